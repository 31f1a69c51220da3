//! Where NCCL may be: where a variable says, where the loader finds it, in packages of Python's.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;

use graph_ep::ep_context::cuda::python_packages;

/// The variable that names the library, or the folder that it is in.
pub(super) const VARIABLE: &str = "GRAPH_EP_NCCL";

const NAME: &str = "libnccl.so.2";

/// Where in a folder of Python packages the wheel that PyTorch depends on puts it.
const WHEEL: &str = "nvidia/nccl/lib";

/// Places to try, the most certain first.
pub(super) fn candidates() -> Vec<PathBuf> {
    candidates_by(|name| env::var_os(name))
}

fn candidates_by(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    if let Some(named) = variable(VARIABLE).filter(|named| !named.is_empty()) {
        let named = PathBuf::from(named);
        return vec![if named.is_dir() { named.join(NAME) } else { named }];
    }
    let mut found = vec![PathBuf::from(NAME)];
    let packages = python_packages(variable).into_iter();
    found
        .extend(packages.map(|folder| folder.join(WHEEL).join(NAME)).filter(|path| path.is_file()));
    found
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    fn with(name: &'static str, value: &Path) -> impl Fn(&str) -> Option<OsString> {
        let value = value.as_os_str().to_owned();
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
        let wheel = root.path().join(WHEEL);
        fs::create_dir_all(&wheel).expect("made");
        let by_path = || candidates_by(with("PYTHONPATH", root.path()));
        assert!(!by_path().contains(&wheel.join(NAME)), "a wheel without the library");
        fs::write(wheel.join(NAME), "").expect("written");
        assert_eq!(by_path()[..2], [PathBuf::from(NAME), wheel.join(NAME)]);
    }
}
