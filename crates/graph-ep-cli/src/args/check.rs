//! Arguments against each other and against the routing.

use std::path::{Path, PathBuf};

use super::RunArgs;
use crate::output;
use crate::routing::{Routing, RoutingError, Shards};

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
    /// A file is to be written where a folder is.
    #[error("{flag} {} is a folder", path.display())]
    IsFolder {
        /// The flag that names it.
        flag: &'static str,
        /// The folder.
        path: PathBuf,
    },
    /// The folder of a file takes none.
    #[error("{flag} {}: no file can be put there: {reason}", path.display())]
    NoPlace {
        /// The flag that names it.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// Two files are to be written to the same place.
    #[error("--report and --plot both name {}", path.display())]
    SameFile {
        /// The place.
        path: PathBuf,
    },
}

/// Checks that the files to be written at the end can be put where they are to be, and are not one file.
pub(crate) fn check_outputs(report: Option<&Path>, plot: Option<&Path>) -> Result<(), ArgsError> {
    for (flag, path) in [("--report", report), ("--plot", plot)] {
        let Some(path) = path else { continue };
        // `name/` names a folder, whether it is there or not.
        if path.is_dir() || path.as_os_str().as_encoded_bytes().ends_with(b"/") {
            return Err(ArgsError::IsFolder { flag, path: path.to_owned() });
        }
        let folder = output::folder_of(path);
        if !folder.is_dir() {
            let (path, folder) = (path.to_owned(), folder.to_owned());
            return Err(ArgsError::NoFolder { flag, path, folder });
        }
        if let Err(error) = output::try_place(path) {
            let (path, reason) = (path.to_owned(), error.to_string());
            return Err(ArgsError::NoPlace { flag, path, reason });
        }
    }
    match (report, plot) {
        (Some(report), Some(plot)) if output::place(report) == output::place(plot) => {
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
    /// [`ArgsError::NoFolder`], [`ArgsError::IsFolder`], [`ArgsError::NoPlace`],
    /// [`ArgsError::SameFile`].
    pub fn check_outputs(&self) -> Result<(), ArgsError> {
        check_outputs(self.report.as_deref(), self.plot.as_deref())
    }

    /// Cuts `routing` to `--steps`, and spreads it over `--ranks`.
    ///
    /// # Errors
    ///
    /// [`ArgsError::Steps`], [`ArgsError::Ranks`].
    pub fn check(&self, mut routing: Routing) -> Result<(Routing, Shards), ArgsError> {
        let name = routing.name().to_owned();
        if let Some(steps) = self.steps {
            routing = routing.first_steps(steps).map_err(|source| ArgsError::Steps {
                steps,
                name: name.clone(),
                source,
            })?;
        }
        match routing.shards(self.ranks) {
            Ok(shards) => Ok((routing, shards)),
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
        assert_eq!(args("--steps 3").check(routing.clone()).unwrap().0.steps(), 3);
        assert_eq!(args("--steps 64 --ranks 64").check(routing.clone()).unwrap().0, routing);
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

    #[cfg(unix)]
    #[test]
    fn outputs_are_files_that_can_be_made() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("file"), b"x").unwrap();
        std::fs::create_dir(at("folder")).unwrap();
        std::os::unix::fs::symlink(at("file"), at("link")).unwrap();
        let there = |report: &str, plot: &str| check_outputs(Some(&at(report)), Some(&at(plot)));
        there("file", "new").unwrap();
        for (report, plot) in [("file", "folder"), ("file", "none/"), ("file", "folder/..")] {
            let error = there(report, plot).unwrap_err();
            assert!(matches!(&error, ArgsError::IsFolder { flag: "--plot", .. }), "{error}");
        }
        for (report, plot) in [
            ("file", "./file"),
            ("file", "folder/../file"),
            ("new", "folder/../new"),
            ("file", "link"),
        ] {
            let error = there(report, plot).unwrap_err();
            assert!(matches!(&error, ArgsError::SameFile { .. }), "{report}, {plot}: {error}");
        }
        // Nothing is there but what was there.
        let mut names: Vec<_> = std::fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        assert_eq!(names, ["file", "folder", "link"]);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_folder_that_takes_no_files_is_refused() {
        let error = check_outputs(Some(Path::new("/proc/r.json")), None).unwrap_err();
        assert!(matches!(&error, ArgsError::NoPlace { flag: "--report", .. }), "{error}");
        // What is no file is written to, not replaced.
        check_outputs(Some(Path::new("/dev/null")), None).unwrap();
    }
}
