//! What the program leaves behind: files, of which nobody ever sees half, and what it says on stdout and
//! stderr.
//!
//! Whoever reads stdout or stderr may go at any time (`graph-ep run | head`). That is no reason to fail,
//! and there is nowhere to say so: everything that is said goes through here, and files are written
//! before what they hold is shown.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use tempfile::NamedTempFile;

/// A file could not be written.
#[derive(Debug, thiserror::Error)]
#[error("{}: cannot be written", path.display())]
pub struct OutputError {
    /// The file.
    pub path: PathBuf,
    /// What the system said.
    pub source: io::Error,
}

/// Writes `text` to stdout, as far as somebody reads it.
pub fn show(text: &str) {
    let mut stdout = io::stdout().lock();
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
}

/// Writes `line` and the end of a line to stderr, as far as somebody reads it.
pub fn tell(line: &str) {
    // In one piece: ranks that are processes share a stderr.
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Puts a file with `bytes` at `path`, replacing what was there, or leaves `path` as it was.
///
/// The bytes go to a temporary file beside it, which is renamed once they are all on disk. Where
/// `path` is no regular file (a terminal, a pipe, `/dev/null`), they are written to it directly,
/// since a rename would replace it. Blocks on the file system.
///
/// # Errors
///
/// [`OutputError`] with what the system said. The temporary file is then gone.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), OutputError> {
    let result = match path.metadata() {
        Ok(there) if !there.is_file() => write_through(path, bytes),
        _ => replace(path, bytes),
    };
    result.map_err(|source| OutputError { path: path.to_owned(), source })
}

/// `report` as JSON, indented, ending in a line feed.
pub(crate) fn json(report: &impl Serialize) -> String {
    // Maps with other than string keys are the only values that can fail, and no report has any.
    let mut json = serde_json::to_string_pretty(report).unwrap_or_default();
    json.push('\n');
    json
}

/// Puts a file with [`json`] of `report` at `path`, as [`write_whole`] does.
///
/// # Errors
///
/// [`OutputError`], if the file cannot be written.
pub(crate) fn write_json(path: &Path, report: &impl Serialize) -> Result<(), OutputError> {
    write_whole(path, json(report).as_bytes())
}

fn write_through(path: &Path, bytes: &[u8]) -> io::Result<()> {
    OpenOptions::new().write(true).open(path)?.write_all(bytes)
}

/// Whether a file could be put at `path` now. Leaves nothing behind.
///
/// # Errors
///
/// What the system says of a folder that is not there or takes no files.
pub(crate) fn try_place(path: &Path) -> io::Result<()> {
    match path.metadata() {
        Ok(there) if !there.is_file() => Ok(()),
        _ => beside(&place(path)).map(drop),
    }
}

/// Where a file is put that is to be at `path`: two paths with the same place are one file.
pub(crate) fn place(path: &Path) -> PathBuf {
    // A link stays a link: what it points to is replaced.
    let file = path.canonicalize().ok();
    let new = || Some(folder_of(path).canonicalize().ok()?.join(path.file_name()?));
    file.or_else(new).unwrap_or_else(|| path.to_owned())
}

/// Where the file of this path lies.
pub(crate) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let place = place(path);
    let mut temporary = beside(&place)?;
    temporary.write_all(bytes)?;
    temporary.as_file().sync_all()?;
    let _: File = temporary.persist(&place)?;
    Ok(())
}

/// A temporary file in the folder of `place`.
fn beside(place: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    // A temporary file is private by default; a result has the permissions of any other new file.
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    builder.prefix(".graph-ep-").tempfile_in(folder_of(place))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names_in(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_file_is_written_and_replaced_and_nothing_else_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report.json");
        write_whole(&path, b"a longer text").unwrap();
        write_whole(&path, b"short").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"short");
        assert_eq!(names_in(folder.path()), ["report.json"]);
    }

    #[test]
    fn failure_leaves_nothing_behind_and_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let error = write_whole(&folder.path().join("none/report.json"), b"x").unwrap_err();
        assert!(error.to_string().contains("none/report.json"));
        // A folder cannot be replaced by a file.
        let taken = folder.path().join("taken");
        std::fs::create_dir(&taken).unwrap();
        write_whole(&taken, b"x").unwrap_err();
        assert_eq!(names_in(folder.path()), ["taken"]);
    }

    #[cfg(unix)]
    #[test]
    fn links_stay_links() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        std::fs::write(&file, b"old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write_whole(&link, b"new").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"new");
        assert!(link.symlink_metadata().unwrap().is_symlink());
    }

    #[cfg(unix)]
    #[test]
    fn what_is_no_file_is_written_to_not_replaced() {
        use std::os::unix::{fs::FileTypeExt, net::UnixListener};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let _listener = UnixListener::bind(&path).unwrap();
        // A socket cannot be opened, so writing fails; what matters is that it is still there.
        write_whole(&path, b"x").unwrap_err();
        assert!(path.metadata().unwrap().file_type().is_socket());
        assert_eq!(names_in(folder.path()), ["socket"]);
    }
}
