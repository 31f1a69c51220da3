//! Why a rank could not join a group over TCP.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use super::super::RendezvousError;

/// Why a rank could not join a group over TCP.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TcpError {
    /// The ranks did not come together.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// The group's name is too long.
    #[error("the group's name has {bytes} bytes, more than the {limit} allowed")]
    Group {
        /// Its length.
        bytes: usize,
        /// The longest allowed.
        limit: usize,
    },
    /// No port is given.
    #[error("no port is given at which the ranks could meet")]
    NoPort,
    /// Anyone on the network could join.
    #[error(
        "{host} is no loopback address: without a job token (GRAPH_EP_JOB_TOKEN) ranks meet on one \
         machine only, at an address such as 127.0.0.1"
    )]
    Unprotected {
        /// The address or name.
        host: String,
    },
    /// Rank 0 could not listen.
    #[error("rank 0 cannot listen at {host}, ports {first_port} to {last_port}")]
    Listen {
        /// The address or name.
        host: String,
        /// The first port tried.
        first_port: u16,
        /// The last port tried.
        last_port: u16,
        /// What the system said at last.
        source: io::Error,
    },
    /// Rank 0 was not found.
    #[error("rank 0 did not come to {host} within {deadline:?}: {obstacle}")]
    Unreachable {
        /// The address or name.
        host: String,
        /// The deadline.
        deadline: Duration,
        /// What was found instead.
        obstacle: Obstacle,
    },
    /// The system refused something that does not depend on other ranks.
    #[error("{call} failed")]
    Os {
        /// The call.
        call: &'static str,
        /// The system's reason.
        source: io::Error,
    },
}

/// What a rank found instead of rank 0.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Obstacle {
    /// There was no time to look.
    #[error("no time was left to connect")]
    Time,
    /// The name is unknown.
    #[error("the name cannot be resolved: {reason}")]
    Unresolved {
        /// The resolver's reason.
        reason: String,
    },
    /// There is no listener.
    #[error("{address}: {reason}")]
    Unconnected {
        /// Where.
        address: SocketAddr,
        /// The system's reason.
        reason: String,
    },
    /// There is a listener that says nothing.
    #[error("{address} was silent")]
    Silent {
        /// Where.
        address: SocketAddr,
    },
    /// There is a listener that hangs up.
    #[error("{address} closed the connection: is it another job's rank 0?")]
    Closed {
        /// Where.
        address: SocketAddr,
    },
    /// There is a listener that speaks another protocol.
    #[error("{address} is not rank 0 of a group")]
    Foreign {
        /// Where.
        address: SocketAddr,
    },
    /// There is rank 0 of a program of another version.
    #[error(
        "{address} speaks version {version} of the protocol; do all ranks run the same version?"
    )]
    Version {
        /// Where.
        address: SocketAddr,
        /// Its version.
        version: u32,
    },
    /// There is rank 0 of a job with another token.
    #[error("{address} does not know this rank's job token (GRAPH_EP_JOB_TOKEN)")]
    Token {
        /// Where.
        address: SocketAddr,
    },
}

impl TcpError {
    pub(super) fn os(call: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Os { call, source }
    }
}
