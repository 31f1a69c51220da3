//! Memory of the same size on every rank, mapped by every rank.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use super::descriptors::exchange;
use super::error::SymmetricError;
use crate::Rank;
use crate::account::{Charge, MemoryAccount};
use crate::backend::{Backend, BackendError, Memory, Retained, SharedMemory};
use crate::rendezvous::{Rendezvous, agree, all_or_none};

/// Memory of this rank that its peers map, and theirs mapped here. A clone is the same block.
pub struct SymmetricBlock<B: Backend> {
    inner: Arc<Inner<B>>,
}

struct Inner<B: Backend> {
    label: String,
    rank: Rank,
    /// By rank, as this rank addresses them.
    addresses: Vec<u64>,
    own: B::Shared,
    /// Held for their mappings only.
    _peers: Vec<B::Peer>,
    /// Behind the memory that it counts, so that it is given back last.
    _charge: Charge,
}

impl<B: Backend> SymmetricBlock<B> {
    /// Allocates `bytes` zeroed bytes on this rank, and maps those of every peer. Only the bytes of
    /// this rank are charged to `account`. `label` names the block in errors.
    ///
    /// Collective: all ranks call it with the same size. Blocks until they have, for at most a few
    /// times `deadline`; allocates, and may synchronise the device.
    ///
    /// # Errors
    ///
    /// All ranks get the block or none does: where the sizes differ, and where a rank cannot
    /// allocate, export or map, every rank gets the same error, naming rank and reason, and keeps
    /// nothing.
    pub fn allocate(
        backend: &B,
        rendezvous: &dyn Rendezvous,
        label: &str,
        bytes: usize,
        account: &MemoryAccount,
        deadline: Duration,
    ) -> Result<Self, SymmetricError> {
        agree(rendezvous, label, &[("bytes", bytes.to_string())], deadline)?;

        let purpose = format!("allocating {label}");
        let allocated = Self::export(backend, label, bytes, account);
        let (charge, own, descriptor) = all_or_none(rendezvous, &purpose, allocated, deadline)?;

        let purpose = format!("mapping {label}");
        let mapped = exchange(rendezvous, descriptor.as_fd(), &purpose, deadline)
            .and_then(|descriptors| Self::import(backend, descriptors, bytes));
        drop(descriptor);
        // A rank that fails at once gets here a whole deadline before one that waits for it.
        let peers = all_or_none(rendezvous, &purpose, mapped, deadline.saturating_mul(2))?;

        let mut addresses: Vec<u64> = peers.iter().map(Memory::address).collect();
        addresses.insert(rendezvous.rank().index(), own.address());
        let (label, rank) = (label.to_owned(), rendezvous.rank());
        Ok(Self {
            inner: Arc::new(Inner { label, rank, addresses, own, _peers: peers, _charge: charge }),
        })
    }

    fn export(
        backend: &B,
        label: &str,
        bytes: usize,
        account: &MemoryAccount,
    ) -> Result<(Charge, B::Shared, OwnedFd), SymmetricError> {
        let charge = account.charge(label, bytes as u64)?;
        let own = backend.allocate_shared(bytes)?;
        let descriptor = own.export()?;
        Ok((charge, own, descriptor))
    }

    /// Maps what the peers sent, in the order of ranks.
    fn import(
        backend: &B,
        descriptors: Vec<Option<OwnedFd>>,
        bytes: usize,
    ) -> Result<Vec<B::Peer>, SymmetricError> {
        let peers: Result<Vec<B::Peer>, BackendError> =
            descriptors.into_iter().flatten().map(|fd| backend.import(fd, bytes)).collect();
        Ok(peers?)
    }

    /// The length on each rank, in bytes: what was asked for.
    pub fn bytes(&self) -> usize {
        self.inner.own.bytes()
    }

    /// The address of this rank's own bytes.
    pub fn own_address(&self) -> u64 {
        self.inner.own.address()
    }

    /// The address here of the bytes of `rank`; `None` for a rank outside the group.
    pub fn address_of(&self, rank: Rank) -> Option<u64> {
        self.inner.addresses.get(rank.index()).copied()
    }

    /// The addresses here of the bytes of every rank, indexed by rank.
    pub fn addresses(&self) -> &[u64] {
        &self.inner.addresses
    }

    /// Keeps the block mapped, here and in this rank's view of its peers. What a peer holds of this
    /// rank's memory stays in any case, since a mapping keeps the memory behind it.
    pub fn retain(&self) -> Retained {
        self.inner.clone()
    }
}

impl<B: Backend> Clone for SymmetricBlock<B> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

impl<B: Backend> fmt::Debug for SymmetricBlock<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SymmetricBlock")
            .field("label", &self.inner.label)
            .field("rank", &self.inner.rank)
            .field("ranks", &self.inner.addresses.len())
            .field("bytes", &self.bytes())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::Relaxed;
    use std::thread;

    use super::*;
    use crate::HostBackend;
    use crate::rendezvous::{RendezvousError, ThreadGroup, ThreadRendezvous};

    const LONG: Duration = Duration::from_secs(60);

    fn on_all<T: Send>(world: usize, body: impl Fn(&ThreadRendezvous) -> T + Sync) -> Vec<T> {
        let group = ThreadGroup::new(world).expect("a group");
        thread::scope(|scope| {
            let body = &body;
            let ranks: Vec<_> = group
                .into_iter()
                .map(|rank| {
                    scope.spawn(move || {
                        let value = body(&rank);
                        rank.barrier("the end", LONG).expect("the group still works");
                        value
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().expect("a rank")).collect()
        })
    }

    fn word(address: u64) -> &'static AtomicU64 {
        let address = std::ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: Every test asks for words of mapped blocks only, which all ranks access as atomics,
        // and drops the references before the blocks.
        unsafe { AtomicU64::from_ptr(address) }
    }

    #[test]
    fn every_rank_writes_into_every_other() {
        for world in 1..=8 {
            on_all(world, |rank| {
                let account = MemoryAccount::new(None);
                let bytes = world * 8;
                let block = SymmetricBlock::allocate(
                    &HostBackend::default(),
                    rank,
                    "words",
                    bytes,
                    &account,
                    LONG,
                )
                .expect("a block");
                assert_eq!(account.used(), bytes as u64);
                assert_eq!(block.address_of(rank.rank()), Some(block.own_address()));
                assert_eq!(block.address_of(Rank::from_index(world)), None);
                for peer in block.addresses() {
                    let place = peer + 8 * u64::from(rank.rank().0);
                    word(place).store(100 + u64::from(rank.rank().0), Relaxed);
                }
                rank.barrier("all have written", LONG).expect("all come");
                for peer in 0..world as u64 {
                    assert_eq!(word(block.own_address() + 8 * peer).load(Relaxed), 100 + peer);
                }
                let retained = block.retain();
                drop(block);
                assert_eq!(account.used(), bytes as u64);
                rank.barrier("all have read", LONG).expect("all come");
                drop(retained);
                assert_eq!(account.used(), 0);
            });
        }
    }

    #[test]
    fn a_rank_without_memory_fails_all_with_one_error() {
        let errors = on_all(4, |rank| {
            let account = MemoryAccount::new((rank.rank() == Rank(2)).then_some(4096));
            let error = SymmetricBlock::allocate(
                &HostBackend::default(),
                rank,
                "staging",
                8192,
                &account,
                LONG,
            )
            .expect_err("one has no memory");
            assert_eq!(account.used(), 0);
            error.to_string()
        });
        let text = "allocating staging: rank 2 failed: out of memory: staging needs 8192 bytes, of \
                    which 4096 are available";
        assert_eq!(errors, [text; 4]);
    }

    #[test]
    fn ranks_that_ask_for_different_sizes_get_nothing() {
        let errors = on_all(3, |rank| {
            let account = MemoryAccount::new(None);
            let bytes = if rank.rank() == Rank(1) { 4096 } else { 8192 };
            let backend = HostBackend::default();
            let error = SymmetricBlock::allocate(&backend, rank, "staging", bytes, &account, LONG)
                .expect_err("sizes differ");
            assert_eq!(account.peak(), 0);
            assert!(matches!(error, SymmetricError::Rendezvous(RendezvousError::Differs { .. })));
            error.to_string()
        });
        assert_eq!(errors, ["staging: bytes is 8192 on rank 0 and 4096 on rank 1"; 3]);
    }
}
