//! Memory that peers map: an anonymous file that cannot change its length, and its descriptor.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;

use super::mapping::{Mapping, failure};
use super::memory::physical_bytes;
use crate::account::{Charge, MemoryAccount};
use crate::backend::{BackendError, Memory, SharedMemory};

/// Zeroed memory of this rank that can be exported to peers.
///
/// The object behind it can neither shrink nor grow, so whoever maps it may touch all of it for as
/// long as it is mapped, whatever becomes of this rank.
#[derive(Debug)]
pub struct HostShared {
    mapping: Mapping,
    what: String,
    bytes: usize,
    descriptor: OwnedFd,
    _charge: Charge,
}

impl HostShared {
    pub(super) fn new(
        what: String,
        account: &MemoryAccount,
        bytes: usize,
    ) -> Result<Self, BackendError> {
        let charge = account.charge(&what, physical_bytes(&what, bytes)? as u64)?;
        let descriptor = create().map_err(|errno| failure("memfd_create", &what, bytes, errno))?;
        rustix::fs::ftruncate(&descriptor, bytes as u64).map_err(|errno| match errno {
            // A length that the system cannot express, rather than a mistake in the call.
            Errno::INVAL => failure("ftruncate", &what, bytes, Errno::FBIG),
            other => failure("ftruncate", &what, bytes, other),
        })?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&descriptor, seals)
            .map_err(|errno| failure("fcntl(F_ADD_SEALS)", &what, bytes, errno))?;
        let mapping = Mapping::shared(&what, descriptor.as_fd(), bytes)?;
        Ok(Self { mapping, what, bytes, descriptor, _charge: charge })
    }
}

/// A sealable anonymous file. Its name shows in the process's memory map and means nothing else.
fn create() -> Result<OwnedFd, Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Systems may insist on files that cannot be executed; old kernels do not know the flag.
    match rustix::fs::memfd_create(c"ep-context", flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => rustix::fs::memfd_create(c"ep-context", flags),
        created => created,
    }
}

impl Memory for HostShared {
    fn address(&self) -> u64 {
        self.mapping.address()
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl SharedMemory for HostShared {
    fn export(&self) -> Result<OwnedFd, BackendError> {
        self.descriptor.try_clone().map_err(|source| BackendError::Os {
            call: "fcntl(F_DUPFD_CLOEXEC)",
            what: self.what.clone(),
            source,
        })
    }
}

/// Memory of a peer, mapped into this process.
#[derive(Debug)]
pub struct HostPeer {
    mapping: Mapping,
    bytes: usize,
}

impl HostPeer {
    pub(super) fn new(
        what: &str,
        descriptor: &OwnedFd,
        bytes: usize,
    ) -> Result<Self, BackendError> {
        let refuse = |reason: String| BackendError::Unavailable { what: what.to_owned(), reason };
        let seals = rustix::fs::fcntl_get_seals(descriptor)
            .map_err(|errno| refuse(format!("its descriptor is not of a memfd ({errno})")))?;
        if !seals.contains(SealFlags::SHRINK) {
            // A peer that shortened it could kill this process by SIGBUS in the middle of a kernel.
            return Err(refuse("its memfd is not sealed against shrinking".to_owned()));
        }
        let status =
            rustix::fs::fstat(descriptor).map_err(|errno| failure("fstat", what, bytes, errno))?;
        let length = u64::try_from(status.st_size).unwrap_or(0);
        if length < bytes as u64 {
            return Err(BackendError::Invalid {
                what: "length of a peer's memory in bytes",
                value: length,
                limit: format!("the range from {bytes} on, the length announced for {what}"),
            });
        }
        Ok(Self { mapping: Mapping::shared(what, descriptor.as_fd(), bytes)?, bytes })
    }
}

impl Memory for HostPeer {
    fn address(&self) -> u64 {
        self.mapping.address()
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::host::testing::{peek, poke};

    fn shared(bytes: usize) -> HostShared {
        HostShared::new("a test".to_owned(), &MemoryAccount::new(None), bytes).expect("memory")
    }

    fn import(descriptor: OwnedFd, bytes: usize) -> Result<HostPeer, BackendError> {
        HostPeer::new("a test", &descriptor, bytes)
    }

    #[test]
    fn owner_and_peer_see_the_same_bytes() {
        let owner = shared(10_000);
        let peer = import(owner.export().expect("a descriptor"), 10_000).expect("the owner's");
        assert_ne!(owner.address(), peer.address());
        assert_eq!((owner.bytes(), peer.bytes()), (10_000, 10_000));
        for (at, byte) in [(0, 1), (4096, 2), (9_999, 3)] {
            assert_eq!(peek(peer.address() + at), 0);
            poke(owner.address() + at, byte);
            assert_eq!(peek(peer.address() + at), byte);
            poke(peer.address() + at, byte + 10);
            assert_eq!(peek(owner.address() + at), byte + 10);
        }
        // What a peer has mapped outlives its owner.
        drop(owner);
        assert_eq!(peek(peer.address() + 9_999), 13);
    }

    #[test]
    fn what_is_shorter_than_announced_is_refused() {
        let owner = shared(5000);
        let error =
            import(owner.export().expect("a descriptor"), 5001).expect_err("one byte short");
        assert!(matches!(error, BackendError::Invalid { value: 5000, .. }), "{error}");
        import(owner.export().expect("a descriptor"), 4999).expect("a part of it");
    }

    #[test]
    fn descriptors_of_other_objects_are_refused() {
        let null = File::open("/dev/null").expect("every system has it");
        let unsealed =
            rustix::fs::memfd_create(c"unsealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
                .expect("memfds are supported");
        rustix::fs::ftruncate(&unsealed, 4096).expect("it is unsealed");
        for descriptor in [OwnedFd::from(null), unsealed] {
            let error = import(descriptor, 4096).expect_err("no shared memory of a rank");
            assert!(matches!(error, BackendError::Unavailable { .. }), "{error}");
        }
    }

    #[test]
    fn nobody_can_change_the_length() {
        let descriptor = shared(4096).export().expect("a descriptor");
        for length in [0, 4095, 4097] {
            assert_eq!(rustix::fs::ftruncate(&descriptor, length), Err(Errno::PERM));
        }
    }

    #[test]
    fn sizes_at_both_ends_are_handled() {
        let account = MemoryAccount::new(None);
        let empty = HostShared::new("a test".to_owned(), &account, 0).expect("nothing is needed");
        assert_ne!(empty.address(), 0);
        assert_eq!((empty.bytes(), account.used()), (0, 0));
        import(empty.export().expect("a descriptor"), 0).expect("nothing is needed");
        for bytes in [1 << 60, usize::MAX] {
            let error = HostShared::new("a test".to_owned(), &account, bytes)
                .expect_err("no machine has that much");
            assert!(matches!(error, BackendError::OutOfMemory { .. }), "{error}");
        }
        assert_eq!(account.used(), 0);
        HostShared::new("a test".to_owned(), &MemoryAccount::new(Some(4095)), 1)
            .expect_err("a page does not fit");
    }
}
