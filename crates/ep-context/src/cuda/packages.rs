//! Folders of Python packages: where libraries of NVIDIA's are on machines that have no toolkit.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// The folders of Python packages with wheels of NVIDIA's in them, each once: those that `PYTHONPATH`
/// names, then those of active environments, of every `python3` on `PATH`, of the user and of the
/// system. A library of NVIDIA's lies in `nvidia/*/lib` of one.
///
/// `variable` is the environment, [`std::env::var_os`] as a rule. Only looks at the file system, and
/// runs no interpreter; a folder that cannot be read is left out.
pub fn python_packages(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    // An empty path would be the present folder, which nobody means.
    let paths = |name: &str| {
        let list = variable(name).unwrap_or_default();
        let paths = env::split_paths(&list).filter(|path| !path.as_os_str().is_empty());
        paths.collect::<Vec<_>>()
    };
    let folder = |name: &str| variable(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(folder).collect();
    for folder in paths("PATH") {
        prefixes.extend(prefixes_of(folder.join("python3")));
    }
    prefixes.extend(folder("HOME").map(|home| home.join(".local")));
    prefixes.extend(["/usr/local", "/usr"].map(PathBuf::from));
    let mut found = Vec::new();
    for folder in paths("PYTHONPATH")
        .into_iter()
        .chain(prefixes.iter().flat_map(|prefix| packages_of(prefix)))
    {
        if folder.join("nvidia").is_dir() && !found.contains(&folder) {
            found.push(folder);
        }
    }
    found
}

/// Where interpreters of this prefix look for packages.
fn packages_of(prefix: &Path) -> Vec<PathBuf> {
    let versions = fs::read_dir(prefix.join("lib")).into_iter().flatten().flatten();
    versions
        .filter(|version| version.file_name().to_string_lossy().starts_with("python3"))
        .flat_map(|version| {
            ["site-packages", "dist-packages"].map(|name| version.path().join(name))
        })
        .collect()
}

/// The prefixes of an interpreter and of what it is a link to, link by link: that of an environment is
/// often reached by a link from elsewhere, and is one itself.
fn prefixes_of(python: PathBuf) -> Vec<PathBuf> {
    // As far as the system itself follows links.
    const MOST: usize = 40;
    let mut prefixes = Vec::new();
    let mut next = python.exists().then_some(python);
    while let Some(path) = next.filter(|_| prefixes.len() < MOST) {
        let Some(folder) = path.parent() else { break };
        prefixes.extend(folder.parent().map(Path::to_owned));
        next = fs::read_link(&path).ok().map(|target| folder.join(target));
    }
    prefixes
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// An environment with a wheel in it, whose interpreter is a link to the system's; beside it
    /// a link to that one.
    fn environment(root: &Path) -> PathBuf {
        let packages = root.join("env/lib/python3.12/site-packages");
        fs::create_dir_all(packages.join("nvidia/cu13/lib")).expect("made");
        fs::create_dir_all(root.join("env/lib/python3.11/site-packages")).expect("made");
        for folder in ["env/bin", "bin", "system/bin"] {
            fs::create_dir_all(root.join(folder)).expect("made");
        }
        fs::write(root.join("system/bin/python3.12"), "").expect("written");
        symlink("../../system/bin/python3.12", root.join("env/bin/python3")).expect("linked");
        symlink(root.join("env/bin/python3"), root.join("bin/python3")).expect("linked");
        packages
    }

    /// What is found below `root` where only the variable `name` is set.
    fn found(root: &Path, name: &str, value: impl Into<OsString>) -> Vec<PathBuf> {
        let value = value.into();
        let mut found = python_packages(|asked| (asked == name).then(|| value.clone()));
        found.retain(|folder| folder.starts_with(root));
        found
    }

    #[test]
    fn an_environment_is_found_by_every_variable_that_names_it() {
        let root = tempfile::tempdir().expect("a folder");
        let root = root.path();
        let packages = environment(root);
        for (name, place) in [
            ("VIRTUAL_ENV", "env"),
            ("CONDA_PREFIX", "env"),
            ("PATH", "env/bin"),
            ("PATH", "bin"),
            ("PYTHONPATH", "env/lib/python3.12/site-packages"),
        ] {
            let found = found(root, name, root.join(place));
            assert_eq!(found, std::slice::from_ref(&packages), "{name}={place}");
        }
        assert!(found(root, "PATH", root.join("system/bin")).is_empty());
        assert!(found(root, "HOME", root.join("env")).is_empty());
    }

    #[test]
    fn a_folder_that_is_named_twice_is_found_once() {
        let root = tempfile::tempdir().expect("a folder");
        let root = root.path();
        let packages = environment(root);
        let path =
            env::join_paths([root.join("env/bin"), root.join("system/bin"), root.join("bin")]);
        assert_eq!(found(root, "PATH", path.expect("no colon in it")), [packages]);
    }

    #[test]
    fn links_that_go_round_end() {
        let root = tempfile::tempdir().expect("a folder");
        let root = root.path();
        symlink("python3", root.join("python3")).expect("linked");
        assert!(found(root, "PATH", root).is_empty());
    }
}
