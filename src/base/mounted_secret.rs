//! Folders that Kubernetes mounts a Secret as: a file for each key.
//!
//! What the keys mean is for the caller to say. Values are never shown.

use super::none_if_missing;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

/// Larger files are no keys; a Secret has at most 1 MiB.
const LARGEST_FILE: u64 = 1 << 20;
/// Readings of a folder that changes meanwhile.
const TRIES: usize = 100;

/// Reads the files of a folder, all of one state: Kubernetes mounts a Secret as links into the folder that `..data`
/// names, and changes it by giving that link another folder and deleting the one before. Whoever reads through one
/// folder, and finds it named still, has seen one whole state.
///
/// # Errors
/// Those of the file system.
pub fn read(folder: &Path) -> io::Result<BTreeMap<String, Vec<u8>>> {
    let named = || none_if_missing(fs::canonicalize(folder.join("..data")));
    let mut tried = 0;
    loop {
        let now = named()?;
        let read = read_files(now.as_deref().unwrap_or(folder));
        if tried == TRIES || named()? == now {
            return read;
        }
        tried += 1;
    }
}

fn read_files(folder: &Path) -> io::Result<BTreeMap<String, Vec<u8>>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        if name.starts_with('.') {
            continue;
        }
        let meta = fs::metadata(entry.path())?;
        if meta.is_file() && meta.len() <= LARGEST_FILE {
            files.insert(name, fs::read(entry.path())?);
        }
    }
    Ok(files)
}

/// Whether a folder looks like a mounted Secret, or like one that is not there.
pub fn is_one(folder: &Path) -> bool {
    folder.join("..data").exists() || read(folder).is_ok_and(|files| files.is_empty())
}

/// What to do if a folder lacks `keys`. A Secret that is not there may be mounted as an empty folder, whose name is
/// the Secret's.
pub fn advice(folder: &Path, keys: &str) -> String {
    let name = folder.file_name().map(|name| name.to_string_lossy());
    let name = name.map(|name| format!(" {name}")).unwrap_or_default();
    format!(
        "give {keys}; in Kubernetes, a Secret{name} with this content must be in the Job's namespace"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_read_without_what_is_no_key() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("key"), b"\xff value\n").unwrap();
        fs::write(at(".hidden"), "x").unwrap();
        fs::write(at("large"), vec![b'x'; LARGEST_FILE as usize + 1]).unwrap();
        fs::create_dir(at("folder")).unwrap();
        let files = read(folder.path()).unwrap();
        let expected = BTreeMap::from([("key".to_owned(), b"\xff value\n".to_vec())]);
        assert_eq!(files, expected);
        assert!(!is_one(folder.path()) && !is_one(&at("nowhere")));
        assert!(is_one(&at("folder")));
        fs::create_dir(at("..data")).unwrap();
        assert!(is_one(folder.path()));
        let e = read(&at("nowhere")).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn the_secret_is_named_as_its_folder() {
        let said = advice(Path::new("/secrets/store/backup.s3/"), "a and b");
        assert!(said.contains("give a and b;"), "{said}");
        assert!(said.contains("a Secret backup.s3 with"), "{said}");
        assert!(advice(Path::new("/"), "a").contains("a Secret with"));
    }
}
