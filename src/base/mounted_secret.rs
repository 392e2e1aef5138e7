//! Reads Secrets that Kubernetes mounts as folders, with one file for each key.
//!
//! The caller interprets the keys. Messages never contain values.

use super::none_if_missing;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

/// Files above 1 MiB, the limit of a Secret, are skipped.
const LARGEST_FILE: u64 = 1 << 20;
/// The maximum number of retries while the folder keeps changing.
const RETRIES: usize = 100;

/// Reads the files of a folder: a consistent version of the Secret, as file names and contents.
///
/// Kubernetes points the link `..data` to a folder with the files. An update creates another folder, moves
/// the link and deletes the old folder. If the link is the same before and after reading, the files belong
/// together.
///
/// # Errors
/// The error of the file system.
pub fn read(folder: &Path) -> io::Result<BTreeMap<String, Vec<u8>>> {
    let linked_folder = || none_if_missing(fs::canonicalize(folder.join("..data")));
    let mut retries = 0;
    loop {
        let before = linked_folder()?;
        let files = read_files(before.as_deref().unwrap_or(folder));
        if retries == RETRIES || linked_folder()? == before {
            return files;
        }
        retries += 1;
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

/// Whether a folder looks like a mounted Secret. An empty folder counts, too: that is how Kubernetes mounts an
/// optional Secret that is missing.
pub fn is_mounted_secret(folder: &Path) -> bool {
    folder.join("..data").exists() || read(folder).is_ok_and(|files| files.is_empty())
}

/// Returns the advice for a folder that lacks `keys`. It takes the folder's name for the Secret's name. The
/// folder may be empty because an optional Secret is missing.
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
    fn hidden_files_large_files_and_folders_are_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("key"), b"\xff value\n").unwrap();
        fs::write(at(".hidden"), "x").unwrap();
        fs::write(at("large"), vec![b'x'; LARGEST_FILE as usize + 1]).unwrap();
        fs::create_dir(at("folder")).unwrap();
        let files = read(folder.path()).unwrap();
        let expected = BTreeMap::from([("key".to_owned(), b"\xff value\n".to_vec())]);
        assert_eq!(files, expected);
        assert!(!is_mounted_secret(folder.path()) && !is_mounted_secret(&at("nowhere")));
        assert!(is_mounted_secret(&at("folder")));
        fs::create_dir(at("..data")).unwrap();
        assert!(is_mounted_secret(folder.path()));
        let e = read(&at("nowhere")).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn the_advice_names_the_secret_by_its_folder() {
        let advised = advice(Path::new("/secrets/store/backup.s3/"), "a and b");
        assert!(advised.contains("give a and b;"), "{advised}");
        assert!(advised.contains("a Secret backup.s3 with"), "{advised}");
        assert!(advice(Path::new("/"), "a").contains("a Secret with"));
    }
}
