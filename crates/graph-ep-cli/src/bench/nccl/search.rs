//! Where NCCL may be: where a variable says, where the loader finds it, in packages of Python's.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// The variable that names the library, or the folder that it is in.
pub(super) const VARIABLE: &str = "GRAPH_EP_NCCL";

const NAME: &str = "libnccl.so.2";

/// Where in a folder of Python packages the wheel that PyTorch depends on puts it.
const WHEEL: &str = "nvidia/nccl/lib";

/// Places to try, the most certain first.
pub(super) fn candidates() -> Vec<PathBuf> {
    candidates_by(|name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from))
}

fn candidates_by(variable: impl Fn(&str) -> Option<PathBuf>) -> Vec<PathBuf> {
    if let Some(named) = variable(VARIABLE) {
        return vec![if named.is_dir() { named.join(NAME) } else { named }];
    }
    let mut found = vec![PathBuf::from(NAME)];
    let folders = package_folders(variable).into_iter();
    found.extend(folders.map(|folder| folder.join(WHEEL).join(NAME)).filter(|path| path.is_file()));
    found.dedup();
    found
}

/// Folders of Python packages: what `PYTHONPATH` names, then those of active environments, of the
/// interpreters on `PATH`, of the user and of the system.
fn package_folders(variable: impl Fn(&str) -> Option<PathBuf>) -> Vec<PathBuf> {
    let list = |name: &str| {
        let list = variable(name).map(PathBuf::into_os_string).unwrap_or_default();
        env::split_paths(&list).collect::<Vec<_>>()
    };
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(&variable).collect();
    for folder in list("PATH") {
        prefixes.extend(prefixes_of(&folder.join("python3")));
    }
    prefixes.extend(variable("HOME").map(|home| home.join(".local")));
    prefixes.extend(["/usr/local", "/usr"].map(PathBuf::from));
    let mut folders = list("PYTHONPATH");
    for prefix in prefixes {
        for version in fs::read_dir(prefix.join("lib")).into_iter().flatten().flatten() {
            if version.file_name().to_string_lossy().starts_with("python3") {
                let names = ["site-packages", "dist-packages"];
                folders.extend(names.map(|name| version.path().join(name)));
            }
        }
    }
    folders
}

/// The prefixes of an interpreter and of what it is a link to, link by link: that of an environment is
/// often reached by a link from elsewhere, and is one itself.
fn prefixes_of(python: &Path) -> Vec<PathBuf> {
    // As far as the system itself follows links.
    const MOST: usize = 40;
    let mut prefixes = Vec::new();
    let mut next = python.exists().then(|| python.to_owned());
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

    fn with(name: &'static str, value: &Path) -> impl Fn(&str) -> Option<PathBuf> {
        let value = value.to_owned();
        move |asked| (asked == name).then(|| value.clone())
    }

    #[test]
    fn the_variable_names_a_file_or_a_folder_and_nothing_else_is_tried() {
        let folder = tempfile::tempdir().expect("a folder");
        let found = candidates_by(with(VARIABLE, folder.path()));
        assert_eq!(found, [folder.path().join(NAME)]);
        let file = folder.path().join("libnccl-of-mine.so");
        assert_eq!(candidates_by(with(VARIABLE, &file)), [file]);
    }

    #[test]
    fn the_loader_is_asked_before_packages() {
        let root = tempfile::tempdir().expect("a folder");
        let wheel = root.path().join("env/lib/python3.12/site-packages").join(WHEEL);
        fs::create_dir_all(&wheel).expect("made");
        fs::write(wheel.join(NAME), "").expect("written");
        fs::create_dir_all(root.path().join("env/bin")).expect("made");
        fs::create_dir_all(root.path().join("bin")).expect("made");
        fs::write(root.path().join("env/bin/python3.12"), "").expect("written");
        symlink("python3.12", root.path().join("env/bin/python3")).expect("linked");
        symlink(root.path().join("env/bin/python3"), root.path().join("bin/python3"))
            .expect("linked");
        for (name, place) in [
            ("VIRTUAL_ENV", "env"),
            ("PATH", "env/bin"),
            ("PATH", "bin"),
            ("PYTHONPATH", "env/lib/python3.12/site-packages"),
        ] {
            let found = candidates_by(with(name, &root.path().join(place)));
            assert_eq!(found[0], Path::new(NAME));
            assert!(found.contains(&wheel.join(NAME)), "{name}={place}: {found:?}");
        }
    }
}
