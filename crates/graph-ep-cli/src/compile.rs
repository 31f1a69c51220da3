//! `graph-ep compile`: compiles the kernels of a configuration before a rank needs them.

use clap::Args;
use graph_ep::BackendError;
use graph_ep::ep_context::cuda::CacheFolder;
use graph_ep::token_dispatch::dispatcher::{device_kernels, specialization};

use crate::args::{Dtype, NumberError, number};
use crate::verdict::Verdict;

/// Arguments of `graph-ep compile`.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct CompileArgs {
    /// The architecture, as NVRTC names it: sm_80, sm_90a, sm_100a
    #[arg(long, value_name = "ARCH", required = true, value_parser = architecture)]
    pub arch: Vec<String>,

    /// Elements of a token: a multiple of 8
    #[arg(long, value_name = "H", value_parser = number::hidden)]
    pub hidden: usize,

    /// Experts of a token
    #[arg(long, value_name = "K", value_parser = number::positive)]
    pub top_k: usize,

    /// Ranks of the expert-parallel group
    #[arg(long, value_name = "N", value_parser = number::positive)]
    pub ranks: usize,

    /// Element type of tokens on their way
    #[arg(long, value_enum, default_value_t)]
    pub dtype: Dtype,
}

fn architecture(text: &str) -> Result<String, NumberError> {
    let known = text.strip_prefix("sm_").is_some_and(|rest| {
        let digits = rest.trim_end_matches(['a', 'f']);
        !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
    });
    if known { Ok(text.to_owned()) } else { Err(NumberError::Architecture) }
}

/// Compiles every kernel for every architecture that `args` name. Needs NVRTC and no GPU.
///
/// # Errors
///
/// What the compiler or the folder refuses.
pub fn run(args: &CompileArgs) -> Result<Verdict, BackendError> {
    let folder = CacheFolder::from_environment();
    let constants =
        specialization(args.hidden, args.top_k, crate::run::dtype(args.dtype), args.ranks);
    for arch in &args.arch {
        for source in device_kernels() {
            folder.prepare(&source, &constants, arch)?;
            println!("{arch}  {}", source.file);
        }
    }
    if let Some(path) = folder.path() {
        println!("kept in {}", path.display());
    }
    Ok(Verdict::Verified)
}
