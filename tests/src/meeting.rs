//! Where ranks that are processes meet, over TCP.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::net::TcpListener;
use std::time::Duration;

use graph_ep::Rank;
use graph_ep::ep_context::rendezvous::{TcpConfig, TcpRendezvous, Token};
use serde::{Deserialize, Serialize};

use crate::backend::PATIENCE;

/// Where the ranks of a group meet: known to them alone, and to who makes it for them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Meeting {
    world: usize,
    ports: Vec<u16>,
    group: String,
    token: String,
}

impl Meeting {
    /// A place that is free now.
    ///
    /// # Panics
    ///
    /// If there is none.
    pub fn new(world: usize) -> Self {
        let free = TcpListener::bind(("127.0.0.1", 0)).and_then(|socket| socket.local_addr());
        let first = free.expect("a port").port();
        // Should somebody take it meanwhile, one of the next will do.
        let ports = (first..=u16::MAX).take(8).collect();
        let secret: [u64; 2] = [0; 2].map(|_: u64| RandomState::new().build_hasher().finish());
        let [group, token] = secret.map(|word| format!("{word:016x}"));
        Self { world, ports, group, token }
    }

    /// The handle of `rank`.
    ///
    /// # Panics
    ///
    /// If the ranks do not meet.
    pub fn join(&self, rank: usize) -> TcpRendezvous {
        self.try_join(rank, PATIENCE).expect("the ranks meet")
    }

    /// The same, within `deadline`.
    ///
    /// # Errors
    ///
    /// What the rendezvous reports, in words.
    pub fn try_join(&self, rank: usize, deadline: Duration) -> Result<TcpRendezvous, String> {
        let ports = self.ports.iter().copied();
        let config = TcpConfig::new(Rank::from_index(rank), self.world, "127.0.0.1", ports)
            .and_then(|config| config.with_group(self.group.clone()));
        let token = Token::new(self.token.clone());
        let config = config.map_err(|error| error.to_string())?.with_token(token);
        TcpRendezvous::meet(&config, deadline).map_err(|error| error.to_string())
    }
}
