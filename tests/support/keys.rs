//! age keys for tests, made by the library and used by age's reference implementation, too.

use super::scratch;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use age::secrecy::ExposeSecret as _;
use age::x25519::Identity;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use deltafold::store::Keys;
use memchr::memmem;
use tempfile::TempDir;

use super::made_backups::{BASE, Bucket, LAST};
use super::tools;

/// An age identity in a file of its own.
pub struct Key {
    identity: Identity,
    folder: TempDir,
}

impl Key {
    pub fn new() -> Self {
        let key = Key {
            identity: Identity::generate(),
            folder: scratch::folder_named("key-").expect("a folder"),
        };
        let text = format!("# public key: {}\n{}\n", key.recipient(), key.secret());
        fs::write(key.file(), text).expect("write the key");
        let mode = fs::Permissions::from_mode(0o600);
        fs::set_permissions(key.file(), mode).expect("hide the key");
        key
    }

    /// `age1…`
    pub fn recipient(&self) -> String {
        self.identity.to_public().to_string()
    }

    /// `AGE-SECRET-KEY-1…`
    pub fn secret(&self) -> String {
        self.identity.to_string().expose_secret().to_owned()
    }

    pub fn file(&self) -> PathBuf {
        self.folder.path().join("identity")
    }

    /// Flags that decrypt with this key.
    pub fn reads(&self) -> [String; 2] {
        let file = self.file().to_str().expect("a path in UTF-8").to_owned();
        ["--age-identity".to_owned(), file]
    }

    /// Flags that encrypt for this key.
    pub fn writes(&self) -> [String; 2] {
        ["--age-recipient".to_owned(), self.recipient()]
    }

    /// Flags that decrypt with this key and encrypt for it.
    pub fn both(&self) -> Vec<String> {
        [self.reads(), self.writes()].concat()
    }

    /// The key as the library takes it, for both directions.
    pub fn keys(&self) -> Keys {
        Keys::new(vec![self.identity.clone()], vec![self.identity.to_public()])
    }

    /// Decrypts an object with the reference implementation.
    pub fn opens(&self, sealed: &[u8]) -> Result<Vec<u8>, String> {
        let file = self.file();
        pipe(
            Command::new(tools::age()).arg("-d").arg("-i").arg(file),
            sealed,
        )
    }
}

/// Encrypts an object for some keys with the reference implementation.
pub fn sealed_for(keys: &[&Key], plain: &[u8]) -> Vec<u8> {
    let mut command = Command::new(tools::age());
    for key in keys {
        command.args(["-r", &key.recipient()]);
    }
    pipe(&mut command, plain).unwrap_or_else(|e| panic!("{e}"))
}

fn pipe(command: &mut Command, input: &[u8]) -> Result<Vec<u8>, String> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start age");
    let mut stdin = child.stdin.take().expect("its stdin");
    let output = std::thread::scope(|scope| {
        scope.spawn(move || {
            // The program may refuse the input before it has read all of it.
            let _ = stdin.write_all(input);
        });
        child.wait_with_output().expect("the end of age")
    });
    match output.status.success() {
        true => Ok(output.stdout),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// Encrypts every snapshot of a folder in place.
pub fn seal_all(store: &Path, keys: &[&Key]) {
    for entry in fs::read_dir(store.join("v2")).expect("v2") {
        let path = entry.expect("an entry").path();
        let sealed = sealed_for(keys, &fs::read(&path).expect("an object"));
        let mut name = path.clone().into_os_string();
        name.push(".age");
        fs::write(name, sealed).expect("write it sealed");
        fs::remove_file(path).expect("remove what is plain");
    }
}

/// Borrows the arguments as `&str`.
pub fn args<S: AsRef<str>>(all: &[S]) -> Vec<&str> {
    all.iter().map(AsRef::as_ref).collect()
}

/// A store with a base and two deltas.
pub fn plain_bucket() -> Bucket {
    let bucket = Bucket::with_base();
    bucket.delta(BASE + 1, 1499, 6);
    bucket.delta(1500, LAST, 9);
    bucket
}

/// The same store, encrypted by the reference implementation.
pub fn sealed_bucket(keys: &[&Key]) -> Bucket {
    let bucket = plain_bucket();
    seal_all(bucket.path(), keys);
    bucket
}

/// Returns a snapshot's bytes as they are stored.
pub fn object(bucket: &Bucket, name: &str) -> Vec<u8> {
    fs::read(bucket.path().join("v2").join(name)).expect("an object")
}

/// Secrets planted in keys and values, and every form that they can have in JSON's base64.
pub fn marks() -> Vec<Vec<u8>> {
    let mark = b"PLANTED-SECRET-OF-THE-KEYSPACE";
    let mut all = vec![mark.to_vec()];
    for shift in 0..3 {
        let text = BASE64.encode([&vec![b'.'; shift], &mark[..]].concat());
        // Cut off both ends: their base64 depends on the neighbouring bytes.
        all.push(text.as_bytes()[4..text.len() - 4].to_vec());
    }
    all
}

pub fn holds_mark(bytes: &[u8], marks: &[Vec<u8>]) -> bool {
    marks.iter().any(|m| memmem::find(bytes, m).is_some())
}
