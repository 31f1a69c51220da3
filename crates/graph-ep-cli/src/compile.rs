//! `graph-ep compile`: compiles the kernels of a configuration before a rank needs them.

use clap::Args;
use graph_ep::ep_context::cuda::{
    CacheFolder, OLDEST_CAPABILITY, architectures, compiles_for, nvrtc_version,
};
use graph_ep::ep_context::{KernelSource, Specialization};
use graph_ep::synthetic::SyntheticExpertKernel;
use graph_ep::token_dispatch::device_kernels;
use graph_ep::{BackendError, Kernel};
use graph_ep_kernels::{HEADERS, limits};

use crate::args::{Dtype, NumberError, number};
use crate::output;
use crate::run::device::NO_COUNTERS;
use crate::soak::kernels as soak;
use crate::verdict::Verdict;

/// Arguments of `graph-ep compile`.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(
    after_help = "Exit codes: 0 compiled and kept; 1 there is no compiler, a kernel does not compile, or \
                  the folder takes none; 2 bad arguments, an architecture that the compiler does not know \
                  among them."
)]
pub struct CompileArgs {
    /// The architecture, as NVRTC names it: sm_80, sm_90a, sm_100a; at least sm_80
    #[arg(long, value_name = "ARCH", required = true, value_parser = architecture)]
    pub arch: Vec<String>,

    /// Elements of a token: a multiple of 8
    #[arg(long, value_name = "H", value_parser = number::hidden)]
    pub hidden: usize,

    /// Experts of a token
    #[arg(long, value_name = "K", value_parser = number::up_to::<{ number::MAX_TOP_K }>)]
    pub top_k: usize,

    /// Ranks of the expert-parallel group
    #[arg(long, value_name = "N", value_parser = number::up_to::<{ number::MAX_RANKS }>)]
    pub ranks: usize,

    /// Element type of tokens on their way
    #[arg(long, value_enum, default_value_t)]
    pub dtype: Dtype,

    /// Kernels that count nothing, as `bench --ops counters` compares with
    #[arg(long)]
    pub without_counters: bool,
}

/// The name of an architecture as far as it can be told without a compiler.
fn architecture(text: &str) -> Result<String, NumberError> {
    let capability = text.strip_prefix("sm_").and_then(|rest| {
        let digits = rest.trim_end_matches(['a', 'f']);
        let all_digits = digits.bytes().all(|byte| byte.is_ascii_digit());
        digits.parse::<u32>().ok().filter(|_| all_digits)
    });
    match capability {
        Some(OLDEST_CAPABILITY..) => Ok(text.to_owned()),
        _ => Err(NumberError::Architecture),
    }
}

/// Why kernels were not compiled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    /// The compiler does not know the architecture.
    #[error(
        "--arch {arch} is none that NVRTC {}.{} compiles for; those are {}",
        version.0, version.1, known.join(", ")
    )]
    Architecture {
        /// What was asked for.
        arch: String,
        /// The compiler's version, major and minor.
        version: (i32, i32),
        /// What it compiles for.
        known: Vec<String>,
    },
    /// The compiler or the folder refused.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

impl CompileError {
    /// How it is told to the shell.
    pub fn verdict(&self) -> Verdict {
        match self {
            Self::Architecture { .. } => Verdict::BadInput,
            Self::Backend(_) => Verdict::Failed,
        }
    }
}

/// Compiles every kernel for every architecture that `args` name, none if one of these is unknown. Needs
/// NVRTC and no GPU.
///
/// # Errors
///
/// [`CompileError`]: what the compiler or the folder refuses.
pub fn run(args: &CompileArgs) -> Result<Verdict, CompileError> {
    for arch in &args.arch {
        if !compiles_for(arch)? {
            let ((_, version), known) = (nvrtc_version()?, architectures()?);
            return Err(CompileError::Architecture { arch: arch.clone(), version, known });
        }
    }
    let folder = CacheFolder::from_environment();
    let kernels = kernels(args);
    for arch in &args.arch {
        for (source, constants) in &kernels {
            folder.prepare(source, constants, arch)?;
            output::show(&format!("{arch}  {}\n", source.file));
        }
    }
    if let Some(path) = folder.path() {
        output::show(&format!("kept in {}\n", path.display()));
    }
    Ok(Verdict::Verified)
}

/// What a rank of this configuration loads, with the constants of each: dispatch and combine, the
/// experts of `run`, what measures a device, and what a soak computes.
fn kernels(args: &CompileArgs) -> Vec<(KernelSource, Specialization)> {
    let dtype = crate::run::dtype(args.dtype);
    let dispatch = device_kernels(args.hidden, args.top_k, dtype, args.ranks);
    let experts = SyntheticExpertKernel::SOURCE
        .into_iter()
        .map(|source| (source, SyntheticExpertKernel::constants(dtype)));
    let limits = limits::ALL
        .iter()
        .map(|(file, text)| (KernelSource { file, text, headers: HEADERS }, Specialization::new()));
    let soaks = soak::SOURCES.into_iter().map(|source| (source, soak::constants(dtype)));
    let all = dispatch.into_iter().chain(experts).chain(limits).chain(soaks);
    all.map(|(source, constants)| match args.without_counters {
        true => (source, constants.with(NO_COUNTERS.0, NO_COUNTERS.1)),
        false => (source, constants),
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use std::thread;

    use graph_ep::ep_context::EpContext;
    use graph_ep::ep_context::host::LoadedKernel;
    use graph_ep::synthetic::SyntheticExperts;
    use graph_ep::{ExpertParallel, HostBackend, ThreadGroup};

    use super::*;
    use crate::bench::limits::{Places, Settings, measure};

    fn ahead(dtype: Dtype) -> Vec<(KernelSource, Specialization)> {
        kernels(&CompileArgs {
            arch: Vec::new(),
            hidden: 64,
            top_k: 2,
            ranks: 1,
            dtype,
            without_counters: false,
        })
    }

    /// With other constants than those of a rank, what is compiled ahead would not be found by it.
    fn assert_compiled_ahead(loaded: &[LoadedKernel], dtype: Dtype) {
        let ahead = ahead(dtype);
        for kernel in loaded {
            let source = kernel.source.expect("it runs on a GPU too");
            let there = ahead.contains(&(source, kernel.constants.clone()));
            assert!(there, "{} for {dtype:?} is not compiled ahead", kernel.name);
        }
    }

    #[test]
    fn all_that_a_run_loads_is_compiled_ahead() {
        for dtype in [Dtype::Bf16, Dtype::Fp16, Dtype::Fp32] {
            let backend = HostBackend::default();
            let rendezvous = ThreadGroup::new(1).unwrap().into_iter().next().unwrap();
            let group = ExpertParallel::<HostBackend>::builder(64, 8, 2, 16)
                .dtype(crate::run::dtype(dtype))
                .build(backend.clone(), rendezvous)
                .unwrap();
            SyntheticExperts::new(&group).unwrap();
            let loaded = backend.loaded();
            assert!(loaded.len() > 10, "{loaded:?}");
            assert_compiled_ahead(&loaded, dtype);
        }
    }

    #[test]
    fn all_that_measures_a_device_is_compiled_ahead() {
        let places = Places { devices: vec![0, 1], multiprocessors: 0 };
        let rank = |rendezvous| {
            let backend = HostBackend::default();
            let context = EpContext::builder(backend.clone(), rendezvous).build().unwrap();
            measure(&context, &places, Settings { bytes: 1 << 10, samples: 1, repeats: 2 })
                .unwrap();
            backend.loaded()
        };
        let loaded = thread::scope(|scope| {
            let group = ThreadGroup::new(2).unwrap();
            let ranks: Vec<_> =
                group.into_iter().map(|one| scope.spawn(move || rank(one))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        });
        for loaded in loaded {
            assert_compiled_ahead(&loaded, Dtype::Bf16);
            assert_eq!(loaded.len(), limits::ALL.len(), "no more is compiled than is loaded");
        }
    }

    #[test]
    fn names_are_of_architectures_that_kernels_are_written_for() {
        for name in ["sm_80", "sm_90a", "sm_100f", "sm_121"] {
            assert_eq!(architecture(name).as_deref(), Ok(name));
        }
        for name in ["", "sm_", "sm_a", "sm_1", "sm_75", "sm_+90", "sm_90 ", "90", "sm_99999999999"]
        {
            assert_eq!(architecture(name), Err(NumberError::Architecture), "{name}");
        }
    }

    #[test]
    fn no_kernel_is_compiled_twice() {
        let ahead = ahead(Dtype::Bf16);
        for (i, kernel) in ahead.iter().enumerate() {
            assert!(!ahead[..i].contains(kernel), "{}", kernel.0.file);
        }
    }
}
