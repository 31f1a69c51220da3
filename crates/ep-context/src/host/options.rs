//! How a host rank presents itself.

use crate::account::MemoryAccount;

/// How a host rank presents itself.
#[derive(Clone, Debug)]
pub struct HostOptions {
    pub(super) label: String,
    pub(super) memory: MemoryAccount,
    pub(super) device: Vec<u8>,
}

impl HostOptions {
    /// A rank without a memory limit. `label` stands before the stream's name in the names of
    /// threads, and in errors.
    pub fn new(label: impl Into<String>) -> Self {
        Self { label: label.into(), memory: MemoryAccount::new(None), device: Vec::new() }
    }

    /// Counts the pages of this rank in `memory`, which stands for the memory of a device: ranks
    /// that are given clones of it share the device. It is exhausted when its limit is.
    #[must_use]
    pub fn with_memory(mut self, memory: MemoryAccount) -> Self {
        self.memory = memory;
        self
    }

    /// Names the device of this rank; without a name it is nobody else's. Ranks that give the same name
    /// act as ranks that share a GPU do, though none is in another's way here: their group pulls unless
    /// it is told how to transfer, and runners of steps in rounds meet to record.
    #[must_use]
    pub fn with_device(mut self, name: impl Into<String>) -> Self {
        self.device = name.into().into_bytes();
        self
    }
}

impl Default for HostOptions {
    fn default() -> Self {
        Self::new("host")
    }
}
