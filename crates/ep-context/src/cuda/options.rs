//! How a rank uses a GPU.

use super::cache::CacheFolder;
use crate::account::MemoryAccount;
use crate::backend::Specialization;

/// How a rank uses a GPU.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    pub(super) ordinal: u32,
    pub(super) label: String,
    pub(super) memory: MemoryAccount,
    pub(super) cache: CacheFolder,
    pub(super) constants: Specialization,
}

impl CudaOptions {
    /// A rank on the GPU of this number, as the driver counts after `CUDA_VISIBLE_DEVICES`, without a
    /// memory limit of its own.
    pub fn new(ordinal: u32) -> Self {
        Self {
            ordinal,
            label: format!("cuda:{ordinal}"),
            memory: MemoryAccount::new(None),
            cache: CacheFolder::from_environment(),
            constants: Specialization::new(),
        }
    }

    /// Stands before the stream's name in errors and traces, instead of `cuda:` and the number.
    #[must_use]
    pub fn with_label(mut self, label: impl Into<String>) -> Self {
        self.label = label.into();
        self
    }

    /// Counts the device memory of this rank in `memory`; ranks that are given clones of it share a
    /// limit.
    #[must_use]
    pub fn with_memory(mut self, memory: MemoryAccount) -> Self {
        self.memory = memory;
        self
    }

    /// Compiles every kernel with one more constant: for measuring variants of kernels, and for nothing
    /// else. They are kept beside the others, in the process and in the cache.
    ///
    /// A constant can make an engine silently wrong: kernels without counters, say, notice no overflow.
    /// Ranks do not compare these constants when a group is set up, though it may need them to be equal.
    /// And where a kernel has a constant of this name, of this call or of its own, this value takes its
    /// place, be it the size of a row.
    #[must_use]
    pub fn with_constant(mut self, name: &'static str, value: u64) -> Self {
        self.constants = self.constants.with(name, value);
        self
    }

    /// Keeps compiled kernels there instead of where the environment says.
    #[must_use]
    pub fn with_cache(mut self, cache: CacheFolder) -> Self {
        self.cache = cache;
        self
    }
}
