//! What the launcher tells a process about its group: the variables that torchrun sets, and ours.

use std::env;
use std::ffi::OsString;
use std::str::FromStr;

use super::{TcpConfig, TcpError, Token};
use crate::Rank;

/// How many ports behind the taken one are tried.
const PORTS: u16 = 16;

/// What the launcher says about this process.
#[derive(Clone, Debug)]
pub struct Environment {
    /// How this rank joins its group.
    pub tcp: TcpConfig,
    /// The position of this rank among those on its machine, which usually is that of its device.
    pub local_rank: usize,
}

/// Why the variables do not say where and as whom to join.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnvironmentError {
    /// A variable is not set.
    #[error("the environment variable {variable} is not set; are the ranks started by a launcher?")]
    Missing {
        /// The variable.
        variable: &'static str,
    },
    /// A variable does not hold what it should.
    #[error("the environment variable {variable} is {value:?}, which is not {expected}")]
    Invalid {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// The values do not describe a rank of a group.
    #[error("the environment variables RANK, WORLD_SIZE and MASTER_ADDR cannot be used")]
    Unusable(#[from] TcpError),
}

impl Environment {
    /// Reads the variables of this process:
    ///
    /// - `RANK`, `WORLD_SIZE`, `LOCAL_RANK`: numbers, counted from zero but for the second.
    ///   `LOCAL_RANK` may be missing, and is zero then.
    /// - `MASTER_ADDR`: the address or name of the machine of rank 0.
    /// - `GRAPH_EP_PORT`: the port at which rank 0 listens. Without it that is `MASTER_PORT`, or, if
    ///   `TORCHELASTIC_USE_AGENT_STORE` is true, so that a store of torchrun listens there, the first
    ///   free one of the 16 behind it.
    /// - `GRAPH_EP_JOB_TOKEN`: the secret of the job. Without it, or if it is empty, `MASTER_ADDR`
    ///   must be a loopback address.
    /// - `TORCHELASTIC_RUN_ID`, if set, and `MASTER_PORT`, if used, keep the groups of different
    ///   jobs on one machine apart.
    ///
    /// # Errors
    ///
    /// [`EnvironmentError`], with the variable and its value.
    pub fn from_environment() -> Result<Self, EnvironmentError> {
        Self::from_lookup(|variable| env::var_os(variable))
    }

    /// The same with the values that `lookup` gives to the names.
    fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self, EnvironmentError> {
        let variables = Variables(&lookup);
        let rank = Rank(variables.number("RANK", "a rank, counted from 0")?);
        let world = variables.number("WORLD_SIZE", "a number of ranks")?;
        let local_rank =
            variables.optional_number("LOCAL_RANK", "a rank, counted from 0")?.unwrap_or(0);
        let host = variables.required("MASTER_ADDR")?;
        let mut group = variables.text("TORCHELASTIC_RUN_ID")?.unwrap_or_default();
        let ports = match variables.optional_number("GRAPH_EP_PORT", PORT)? {
            Some(0) => return Err(variables.invalid("GRAPH_EP_PORT", PORT)),
            Some(port) => port..=port,
            None => {
                let port: u16 = variables.number("MASTER_PORT", PORT)?;
                group = format!("{group}:{port}");
                variables.ports(port)?
            }
        };
        let token = lookup("GRAPH_EP_JOB_TOKEN").map(OsString::into_encoded_bytes);
        let tcp = TcpConfig::new(rank, world, host, ports)?
            .with_group(group)?
            .with_token(token.and_then(Token::new));
        Ok(Self { tcp, local_rank })
    }
}

const PORT: &str = "a port from 1 to 65535";

struct Variables<'a>(&'a dyn Fn(&str) -> Option<OsString>);

impl Variables<'_> {
    /// The value of a variable, which counts as not set where it is empty.
    fn text(&self, variable: &'static str) -> Result<Option<String>, EnvironmentError> {
        let Some(value) = (self.0)(variable).filter(|value| !value.is_empty()) else {
            return Ok(None);
        };
        value.into_string().map(Some).map_err(|_| self.invalid(variable, "valid UTF-8"))
    }

    fn required(&self, variable: &'static str) -> Result<String, EnvironmentError> {
        self.text(variable)?.ok_or(EnvironmentError::Missing { variable })
    }

    fn number<T: FromStr>(
        &self,
        variable: &'static str,
        expected: &'static str,
    ) -> Result<T, EnvironmentError> {
        self.required(variable)?.trim().parse().map_err(|_| self.invalid(variable, expected))
    }

    fn optional_number<T: FromStr>(
        &self,
        variable: &'static str,
        expected: &'static str,
    ) -> Result<Option<T>, EnvironmentError> {
        match self.text(variable)? {
            Some(_) => self.number(variable, expected).map(Some),
            None => Ok(None),
        }
    }

    /// Where rank 0 listens if MASTER_PORT is `port`.
    fn ports(&self, port: u16) -> Result<std::ops::RangeInclusive<u16>, EnvironmentError> {
        let variable = "TORCHELASTIC_USE_AGENT_STORE";
        let taken = match self.text(variable)?.map(|value| value.to_ascii_lowercase()).as_deref() {
            Some("true" | "1") => true,
            None | Some("false" | "0") => false,
            Some(_) => return Err(self.invalid(variable, "true or false")),
        };
        match (port, taken) {
            (0, _) => Err(self.invalid("MASTER_PORT", PORT)),
            (port, false) => Ok(port..=port),
            (u16::MAX, true) => Err(self.invalid(
                "MASTER_PORT",
                "a port with another one behind it; set GRAPH_EP_PORT to the port to be used",
            )),
            (port, true) => Ok(port + 1..=port.saturating_add(PORTS)),
        }
    }

    fn invalid(&self, variable: &'static str, expected: &'static str) -> EnvironmentError {
        let value = (self.0)(variable).unwrap_or_default().to_string_lossy().into_owned();
        EnvironmentError::Invalid { variable, value, expected }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;
    use crate::rendezvous::RendezvousError;

    const TORCHRUN: [(&str, &str); 5] = [
        ("RANK", "3"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "node-0.cluster"),
        ("MASTER_PORT", "29500"),
    ];

    /// The variables of torchrun, with some others set, and unset where the value is empty.
    fn read(changes: &[(&str, &str)]) -> Result<Environment, EnvironmentError> {
        Environment::from_lookup(|name| {
            let named = |(variable, value): &(&str, &str)| {
                (*variable == name).then(|| OsString::from(value))
            };
            changes.iter().find_map(named).or_else(|| TORCHRUN.iter().find_map(named))
        })
    }

    fn ports(changes: &[(&str, &str)]) -> Vec<u16> {
        read(changes).expect("readable").tcp.ports().to_vec()
    }

    #[test]
    fn the_variables_of_torchrun_say_all() {
        let environment = read(&[]).expect("readable");
        let tcp = &environment.tcp;
        assert_eq!((tcp.rank(), tcp.world(), environment.local_rank), (Rank(3), 8, 1));
        assert_eq!((tcp.host(), tcp.ports()), ("node-0.cluster", &[29500][..]));
        assert_eq!(read(&[("LOCAL_RANK", "")]).expect("readable").local_rank, 0);
        for host in ["10.1.2.3", "::1", "[2001:db8::7]"] {
            let environment = read(&[("MASTER_ADDR", host)]).expect("readable");
            assert_eq!(environment.tcp.host(), host);
        }
    }

    #[test]
    fn a_port_that_is_taken_is_passed_by() {
        let store = |value| ("TORCHELASTIC_USE_AGENT_STORE", value);
        for taken in ["True", "true", "1", "TRUE"] {
            assert_eq!(ports(&[store(taken)]), (29501..=29516).collect::<Vec<_>>());
        }
        for free in ["False", "0", ""] {
            assert_eq!(ports(&[store(free)]), [29500]);
        }
        assert_eq!(ports(&[store("1"), ("GRAPH_EP_PORT", "4000")]), [4000]);
        assert_eq!(ports(&[("GRAPH_EP_PORT", "4000"), ("MASTER_PORT", "")]), [4000]);
        assert_eq!(ports(&[store("1"), ("MASTER_PORT", "65533")]), [65534, 65535]);
    }

    #[test]
    fn errors_name_the_variable_and_its_value() {
        let text = |changes: &[(&str, &str)]| read(changes).expect_err("unreadable").to_string();
        for variable in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
            let text = text(&[(variable, "")]);
            assert!(text.contains(&format!("{variable} is not set")), "{text}");
        }
        for variable in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "GRAPH_EP_PORT"] {
            for value in ["-1", "x", "1.5", "4294967296000"] {
                // A machine word holds the last, where it is a number of ranks.
                if value.len() > 5 && matches!(variable, "WORLD_SIZE" | "LOCAL_RANK") {
                    continue;
                }
                let text = text(&[(variable, value)]);
                assert!(text.contains(&format!("{variable} is {value:?}, which is not")), "{text}");
            }
        }
        for variable in ["MASTER_PORT", "GRAPH_EP_PORT"] {
            assert!(text(&[(variable, "0")]).contains(&format!("{variable} is \"0\"")));
        }
        let store = ("TORCHELASTIC_USE_AGENT_STORE", "yes");
        assert!(text(&[store]).contains("TORCHELASTIC_USE_AGENT_STORE is \"yes\""));
        let store = ("TORCHELASTIC_USE_AGENT_STORE", "1");
        assert!(text(&[store, ("MASTER_PORT", "65535")]).contains("set GRAPH_EP_PORT"));
        let error = read(&[("RANK", "8")]).expect_err("outside");
        let outside = RendezvousError::Rank { rank: Rank(8), world: 8 }.to_string();
        assert_eq!(std::error::Error::source(&error).expect("a cause").to_string(), outside);
        let error = Environment::from_lookup(|_| Some(OsString::from_vec(vec![0xff])));
        let text = error.expect_err("no text").to_string();
        assert!(text.contains("RANK is") && text.contains("UTF-8"), "{text}");
    }

    #[test]
    fn a_token_is_kept_and_not_printed() {
        let with = read(&[("GRAPH_EP_JOB_TOKEN", "secret")]).expect("readable");
        let without = read(&[("GRAPH_EP_JOB_TOKEN", "")]).expect("readable");
        let text = format!("{with:?}");
        assert!(text.contains("Some(Token(..))") && !text.contains("secret"), "{text}");
        assert!(format!("{without:?}").contains("token: None"));
    }
}
