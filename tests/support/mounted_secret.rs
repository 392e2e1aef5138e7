//! Folders in which Kubernetes mounts a Secret.

use super::scratch;
use std::fs;
use std::os::unix::fs::symlink;
use tempfile::TempDir;

/// A Secret as kubelet mounts it: `..data` is a symbolic link that is replaced at each update.
pub struct Mounted(TempDir);

impl Mounted {
    pub fn new(settings: &[(&str, &str)]) -> Self {
        let mounted = Mounted(scratch::folder_named("secret-").unwrap());
        mounted.change(settings);
        for (name, _) in settings {
            symlink(format!("..data/{name}"), mounted.0.path().join(name)).unwrap();
        }
        mounted
    }

    pub fn path(&self) -> &str {
        self.0.path().to_str().unwrap()
    }

    pub fn change(&self, settings: &[(&str, &str)]) {
        let state = format!("..{:016x}", fastrand::u64(..));
        let folder = self.0.path();
        fs::create_dir(folder.join(&state)).unwrap();
        for (name, value) in settings {
            fs::write(folder.join(&state).join(name), value).unwrap();
        }
        let before = fs::read_link(folder.join("..data"));
        symlink(&state, folder.join("..data_tmp")).unwrap();
        fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
        if let Ok(before) = before {
            fs::remove_dir_all(folder.join(before)).unwrap();
        }
    }
}
