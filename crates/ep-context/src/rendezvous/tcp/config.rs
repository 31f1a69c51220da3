//! Where and as whom a rank joins a group over TCP.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};

use super::super::check_place;
use super::error::TcpError;
use super::proof::Token;
use crate::Rank;

/// The longest name of a group, in bytes.
pub(super) const GROUP_LIMIT: usize = 512;

/// Where and as whom a rank joins a group over TCP. All ranks have the same but for their own rank.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    pub(super) rank: Rank,
    pub(super) world: usize,
    pub(super) host: String,
    pub(super) ports: Vec<u16>,
    pub(super) group: String,
    pub(super) token: Option<Token>,
}

impl TcpConfig {
    /// For `rank` of a group of `world` ranks, which meet at `host`, where rank 0 runs: an IPv4 or
    /// IPv6 address, or a name, for which rank 0 listens at all addresses of its machine, if only
    /// ranks with a token can join. Rank 0 takes the first of `ports` that is free, and the others look
    /// for it at all of them; whatever else listens there does no harm.
    ///
    /// # Errors
    ///
    /// A [`RendezvousError`](super::super::RendezvousError): `World` if `world` is zero or above
    /// [`MAX_WORLD`](super::super::MAX_WORLD), `Rank` if `rank` is outside the group.
    /// [`TcpError::NoPort`] if there is no port, or it is zero.
    pub fn new(
        rank: Rank,
        world: usize,
        host: impl Into<String>,
        ports: impl IntoIterator<Item = u16>,
    ) -> Result<Self, TcpError> {
        check_place(rank, world)?;
        let ports: Vec<u16> = ports.into_iter().collect();
        if ports.is_empty() || ports.contains(&0) {
            return Err(TcpError::NoPort);
        }
        let (group, token) = (String::new(), None);
        Ok(Self { rank, world, host: host.into(), ports, group, token })
    }

    /// Gives the group a name, which is no secret: ranks pass by rank 0 of a group with another one.
    ///
    /// # Errors
    ///
    /// [`TcpError::Group`] if the name is longer than 512 bytes.
    pub fn with_group(self, group: impl Into<String>) -> Result<Self, TcpError> {
        let group = group.into();
        if group.len() > GROUP_LIMIT {
            return Err(TcpError::Group { bytes: group.len(), limit: GROUP_LIMIT });
        }
        Ok(Self { group, ..self })
    }

    /// Lets only those join who have `token`, and so allows addresses outside this machine.
    #[must_use]
    pub fn with_token(self, token: Option<Token>) -> Self {
        Self { token, ..self }
    }

    /// The name of the group; empty if it has none.
    pub fn group(&self) -> &str {
        &self.group
    }

    /// The rank that joins.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The number of ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    /// The address or name where the ranks meet.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The ports where they may meet, in the order in which they are tried.
    pub fn ports(&self) -> &[u16] {
        &self.ports
    }

    /// All places where the ranks may meet, those of the first port first. A name is resolved by the
    /// system, which may block for as long as it is configured to.
    pub(super) fn addresses(&self) -> Result<Vec<SocketAddr>, Unusable> {
        let mut hosts = self.resolve().map_err(Unusable::Unresolved)?;
        if self.token.is_none() {
            hosts.retain(|host| host.to_canonical().is_loopback());
            if hosts.is_empty() {
                return Err(Unusable::Unprotected);
            }
        }
        Ok(self.places(&hosts))
    }

    /// Where rank 0 may listen, in the order in which to try.
    pub(super) fn listening(&self) -> Result<Vec<SocketAddr>, Unusable> {
        let local = self.host == "localhost" || self.host.ends_with(".localhost");
        if self.token.is_none() || local || self.literal().is_some() {
            return self.addresses();
        }
        // A machine often knows itself by another address than others do, even by a loopback one.
        Ok(self.places(&[Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()]))
    }

    fn places(&self, hosts: &[IpAddr]) -> Vec<SocketAddr> {
        let at = |port: &u16| hosts.iter().map(|host| SocketAddr::new(*host, *port)).collect();
        self.ports.iter().flat_map(|port| -> Vec<SocketAddr> { at(port) }).collect()
    }

    /// The host if it is an address, as it is or in brackets as in an URL.
    fn literal(&self) -> Option<IpAddr> {
        let bare = self.host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        bare.unwrap_or(&self.host).parse().ok()
    }

    fn resolve(&self) -> io::Result<Vec<IpAddr>> {
        if let Some(host) = self.literal() {
            return Ok(vec![host]);
        }
        let mut hosts = Vec::new();
        for address in (self.host.as_str(), 0).to_socket_addrs()? {
            if !hosts.contains(&address.ip()) {
                hosts.push(address.ip());
            }
        }
        if hosts.is_empty() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "it has no address"));
        }
        Ok(hosts)
    }
}

/// Why there is no place to meet.
#[derive(Debug)]
pub(super) enum Unusable {
    Unresolved(io::Error),
    Unprotected,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::{MAX_WORLD, RendezvousError};

    fn config(host: &str) -> TcpConfig {
        TcpConfig::new(Rank(1), 2, host, [4000, 4001]).expect("a configuration")
    }

    fn places(host: &str) -> Vec<String> {
        let places = config(host).addresses().expect("usable");
        places.iter().map(SocketAddr::to_string).collect()
    }

    #[test]
    fn addresses_of_both_families_and_names_are_places() {
        assert_eq!(places("127.0.0.1"), ["127.0.0.1:4000", "127.0.0.1:4001"]);
        assert_eq!(places("::1"), ["[::1]:4000", "[::1]:4001"]);
        assert_eq!(places("[::1]"), places("::1"));
        let named = places("localhost");
        assert!(
            named.contains(&"127.0.0.1:4000".to_owned())
                || named.contains(&"[::1]:4000".to_owned())
        );
        let name = config("no such name").addresses();
        assert!(matches!(name, Err(Unusable::Unresolved(_))), "{name:?}");
    }

    #[test]
    fn rank_0_listens_at_an_address_and_for_a_name_at_all() {
        let listening = |host: &str| {
            let config = config(host).with_token(Token::new("secret"));
            let places = config.listening().expect("usable");
            places.iter().map(SocketAddr::to_string).collect::<Vec<_>>()
        };
        assert_eq!(listening("10.0.0.1"), ["10.0.0.1:4000", "10.0.0.1:4001"]);
        let all = ["[::]:4000", "0.0.0.0:4000", "[::]:4001", "0.0.0.0:4001"];
        assert_eq!(listening("node-0"), all);
        assert!(listening("localhost").iter().all(|place| !all.contains(&place.as_str())));
    }

    #[test]
    fn without_a_token_only_loopback_will_do() {
        for host in ["10.0.0.1", "0.0.0.0", "::", "2001:db8::1", "::ffff:10.0.0.1"] {
            let open = config(host);
            assert!(matches!(open.addresses(), Err(Unusable::Unprotected)), "{host}");
            assert!(open.with_token(Token::new("secret")).addresses().is_ok(), "{host}");
        }
        assert!(config("127.8.9.10").addresses().is_ok());
        assert!(config("::ffff:127.0.0.1").addresses().is_ok());
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let new = |rank, world, ports: &[u16]| {
            TcpConfig::new(Rank(rank), world, "::1", ports.iter().copied()).map(drop)
        };
        assert!(matches!(
            new(0, 0, &[1]),
            Err(TcpError::Rendezvous(RendezvousError::World { .. }))
        ));
        assert!(matches!(new(0, MAX_WORLD + 1, &[1]), Err(TcpError::Rendezvous(_))));
        assert!(matches!(
            new(2, 2, &[1]),
            Err(TcpError::Rendezvous(RendezvousError::Rank { rank: Rank(2), world: 2 }))
        ));
        assert!(matches!(new(0, 2, &[]), Err(TcpError::NoPort)));
        assert!(matches!(new(0, 2, &[1, 0]), Err(TcpError::NoPort)));
        let group = "g".repeat(GROUP_LIMIT);
        assert!(config("::1").with_group(group.clone()).is_ok());
        assert!(matches!(config("::1").with_group(group + "g"), Err(TcpError::Group { .. })));
    }
}
