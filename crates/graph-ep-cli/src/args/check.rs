//! Arguments against each other and against the routing.

use std::path::{Path, PathBuf};

use super::RunArgs;
use crate::routing::{Routing, RoutingError};

/// Why arguments that parsed cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ArgsError {
    /// The routing cannot be spread over so many ranks.
    #[error("--ranks {ranks} does not go with the routing {name:?}")]
    Ranks {
        /// Ranks asked for.
        ranks: usize,
        /// The routing.
        name: String,
        /// Why not.
        source: RoutingError,
    },
    /// The routing has fewer steps.
    #[error("--steps {steps} does not go with the routing {name:?}")]
    Steps {
        /// Steps asked for.
        steps: usize,
        /// The routing.
        name: String,
        /// Why not.
        source: RoutingError,
    },
    /// A file is to be written where there is no folder.
    #[error("{flag} {}: there is no folder {}", path.display(), folder.display())]
    NoFolder {
        /// The flag that names it.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// The folder that does not exist.
        folder: PathBuf,
    },
    /// Two files are to be written to the same place.
    #[error("--report and --plot both name {}", path.display())]
    SameFile {
        /// The place.
        path: PathBuf,
    },
}

/// Checks that the files to be written at the end have a folder each, and are not one file.
pub(crate) fn check_outputs(report: Option<&Path>, plot: Option<&Path>) -> Result<(), ArgsError> {
    for (flag, path) in [("--report", report), ("--plot", plot)] {
        let Some(path) = path else { continue };
        let folder = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        if !folder.is_dir() {
            let (path, folder) = (path.to_owned(), folder.to_owned());
            return Err(ArgsError::NoFolder { flag, path, folder });
        }
    }
    match (report, plot) {
        (Some(report), Some(plot)) if report == plot => {
            Err(ArgsError::SameFile { path: plot.to_owned() })
        }
        _ => Ok(()),
    }
}

impl RunArgs {
    /// Checks what can be checked before anything is loaded: that the files to be written at the
    /// end of a long run have somewhere to go.
    ///
    /// # Errors
    ///
    /// [`ArgsError::NoFolder`], [`ArgsError::SameFile`].
    pub fn check_outputs(&self) -> Result<(), ArgsError> {
        check_outputs(self.report.as_deref(), self.plot.as_deref())
    }

    /// Cuts `routing` to `--steps`, and checks that it can be spread over `--ranks`.
    ///
    /// # Errors
    ///
    /// [`ArgsError::Steps`], [`ArgsError::Ranks`].
    pub fn check(&self, mut routing: Routing) -> Result<Routing, ArgsError> {
        let name = routing.name().to_owned();
        if let Some(steps) = self.steps {
            routing = routing.first_steps(steps).map_err(|source| ArgsError::Steps {
                steps,
                name: name.clone(),
                source,
            })?;
        }
        match routing.shards(self.ranks) {
            Ok(_) => Ok(routing),
            Err(source) => Err(ArgsError::Ranks { ranks: self.ranks, name, source }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Cli, Command};
    use super::*;
    use crate::trace;
    use clap::Parser;

    fn args(line: &str) -> RunArgs {
        let words = ["graph-ep", "run"].into_iter().chain(line.split_whitespace());
        let Command::Run(args) = Cli::parse_from(words).command else { panic!("another command") };
        args
    }

    #[test]
    fn steps_and_ranks_must_go_with_the_routing() {
        let routing = trace::built_in().unwrap();
        assert_eq!(args("--steps 3").check(routing.clone()).unwrap().steps(), 3);
        assert_eq!(args("--steps 64 --ranks 64").check(routing.clone()).unwrap(), routing);
        let too_long = args("--steps 65").check(routing.clone());
        assert!(matches!(
            too_long,
            Err(ArgsError::Steps {
                steps: 65,
                source: RoutingError::NotEnoughSteps { available: 64, .. },
                ..
            })
        ));
        assert!(matches!(
            args("--ranks 65").check(routing),
            Err(ArgsError::Ranks {
                source: RoutingError::MoreRanksThanExperts { ranks: 65, experts: 64 },
                ..
            })
        ));
    }

    #[test]
    fn outputs_need_a_folder_each_its_own_file() {
        args("--report r.json --plot p.svg").check_outputs().unwrap();
        let error = args("--plot no/such/folder/p.svg").check_outputs().unwrap_err();
        assert!(matches!(&error, ArgsError::NoFolder { flag: "--plot", .. }), "{error}");
        assert!(matches!(
            args("--report same --plot same").check_outputs(),
            Err(ArgsError::SameFile { .. })
        ));
    }
}
