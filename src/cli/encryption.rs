//! The flags of encryption, and the key files that they name.
//!
//! `store_access` flattens them into all commands that open a store.

use crate::backup::trust::Trust;
use crate::base::flag_values::yes_or_no;
use crate::base::mounted_secret;
use crate::error::{Reason, Result};
use crate::store::Keys;
use crate::store::encryption::{ARMORED, MAGIC, MAX_RECIPIENTS};
use age::x25519::{Identity, Recipient};
use clap::Args;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The age keys of a backup.
#[derive(Debug, Args)]
#[command(next_help_heading = "Encryption")]
pub(super) struct EncryptionArgs {
    /// Encrypt snapshots for this age recipient (age1…); repeatable
    #[arg(
        long,
        hide_env_values = true,
        value_name = "RECIPIENT",
        value_delimiter = ','
    )]
    age_recipient: Vec<String>,
    /// Encrypt snapshots for the age recipients in this file, one per line
    #[arg(long, hide_env_values = true, value_name = "FILE")]
    age_recipients_file: Option<PathBuf>,
    /// Decrypt snapshots with the age identities (AGE-SECRET-KEY-1…) in this file; repeatable
    #[arg(
        long,
        hide_env_values = true,
        value_name = "FILE",
        value_delimiter = ','
    )]
    age_identity: Vec<PathBuf>,
}

/// Whether plain snapshots count although keys are given.
#[derive(Debug, Clone, Copy, Default, Args)]
#[command(next_help_heading = "Encryption")]
pub(super) struct PlaintextArg {
    /// Count snapshots that are not encrypted, too, although keys are given: anybody who can write to the store may have
    /// made them
    #[arg(long, value_parser = yes_or_no)]
    allow_plaintext: bool,
}

impl PlaintextArg {
    /// Which snapshots count, if a key is given that says that the backup is encrypted.
    pub(super) fn trust(self, has_key: bool) -> Trust {
        if has_key && !self.allow_plaintext {
            Trust::OnlyEncrypted
        } else {
            Trust::All
        }
    }
}

/// Maximum size of a key file in bytes. A key has fewer than a hundred.
const MAX_FILE: u64 = 1 << 20;

impl EncryptionArgs {
    /// The keys that the flags name.
    ///
    /// # Errors
    /// `Usage` if a recipient is invalid, or if a secret key is given in place of its file. `Configuration` if a
    /// file cannot be read or does not hold age keys.
    pub(super) fn keys(&self) -> Result<Keys> {
        let mut recipients = Vec::new();
        for text in &self.age_recipient {
            let subject = format!("--age-recipient {text} is");
            recipients.push(parse_recipient(
                text,
                "--age-recipient",
                &subject,
                Reason::Usage,
            )?);
        }
        if let Some(file) = &self.age_recipients_file {
            let source = source("--age-recipients-file", file)?;
            // Do not show the line: it may be a secret.
            let subject = format!("{source} has a line that is");
            for line in read_lines(file, &source)?.0 {
                let reason = Reason::Configuration;
                recipients.push(parse_recipient(&line, &source, &subject, reason)?);
            }
        }
        if recipients.len() > MAX_RECIPIENTS {
            return Err(Reason::Configuration.error(format!(
                "{} age recipients are given, but at most {MAX_RECIPIENTS} are allowed",
                recipients.len()
            )));
        }
        let identities = identities(&self.age_identity, "--age-identity")?;
        Ok(Keys::new(identities, recipients))
    }
}

/// The keys of files that `flag` names, which only decrypt.
///
/// # Errors
/// `Configuration` if a file cannot be read or does not hold age identities.
pub(super) fn decrypting(files: &[PathBuf], flag: &str) -> Result<Keys> {
    Ok(Keys::new(identities(files, flag)?, Vec::new()))
}

fn identities(files: &[PathBuf], flag: &str) -> Result<Vec<Identity>> {
    let mut identities = Vec::new();
    for file in files {
        let source = source(flag, file)?;
        let (lines, mode) = read_lines(file, &source)?;
        for line in lines {
            identities.push(parse_identity(&line, &source)?);
        }
        // Ignore the group's rights: Kubernetes lets the group of a Pod read a mounted Secret.
        if mode & 0o007 != 0 {
            tracing::warn!("{source} can be read by every user of this machine: run chmod 600");
        }
    }
    Ok(identities)
}

/// Whether a text contains an identity, in upper or lower case.
fn holds_secret(text: &str) -> bool {
    text.to_ascii_uppercase().contains("AGE-SECRET-KEY")
}

/// The flag and its file, as messages name them.
///
/// # Errors
/// `Usage` if the value is the secret itself instead of its file. The message does not show it.
fn source(flag: &str, file: &Path) -> Result<String> {
    let file = file.to_string_lossy();
    if holds_secret(&file) {
        Err(Reason::Usage.error(format!(
            "{flag} takes the name of a file, but an identity itself was given: it is no longer secret, because the list of processes shows it; create a new one in a file"
        )))
    } else {
        Ok(format!("{flag} {file}"))
    }
}

/// Parses a recipient. An error begins with `subject`, or with `source` if the text is an identity.
fn parse_recipient(text: &str, source: &str, subject: &str, reason: Reason) -> Result<Recipient> {
    if holds_secret(text) {
        return Err(reason.error(format!(
            "{source}: an identity (AGE-SECRET-KEY-1…) is given in place of a recipient (age1…): `age-keygen -y` prints the recipient of an identity"
        )));
    }
    let parsed = text.trim().parse();
    parsed
        .map_err(|e: &str| reason.error(format!("{subject} not an X25519 recipient (age1…): {e}")))
}

fn parse_identity(line: &str, source: &str) -> Result<Identity> {
    line.parse().map_err(|_| {
        // Do not show the line: it may be a secret.
        let problem = if line.starts_with("age1") {
            "has a recipient (age1…), which can only encrypt: give the identity of it"
        } else {
            "has a line that is not an X25519 identity (AGE-SECRET-KEY-1…)"
        };
        Reason::Configuration.error(format!("{source} {problem}"))
    })
}

/// Returns the lines of a key file, without empty lines and comments, and the file's mode.
fn read_lines(file: &Path, source: &str) -> Result<(Vec<String>, u32)> {
    let error = |problem: &str| Reason::Configuration.error(format!("{source} {problem}"));
    let (bytes, mode) =
        read_with_mode(file).map_err(|e| match (e.kind(), file.parent(), file.file_name()) {
            // The Secret does not exist, or lacks the key.
            (ErrorKind::NotFound, Some(folder), Some(key))
                if mounted_secret::is_mounted_secret(folder) =>
            {
                let advice = mounted_secret::advice(folder, &key.to_string_lossy());
                error(&format!("does not exist: {advice}"))
            }
            _ => error(&format!("cannot be read: {e}")),
        })?;
    if bytes.starts_with(MAGIC) || bytes.starts_with(ARMORED) {
        return Err(error(
            "is encrypted itself: give a file that was decrypted with `age --decrypt`",
        ));
    }
    if bytes.len() as u64 > MAX_FILE {
        return Err(error("is not a file of age keys"));
    }
    let text = String::from_utf8(bytes).map_err(|_| error("is not a file of age keys"))?;
    let lines: Vec<String> = text
        .lines()
        .map(str::trim)
        .filter(|l| !l.is_empty() && !l.starts_with('#'))
        .map(str::to_owned)
        .collect();
    if lines.is_empty() {
        Err(error("has no key"))
    } else {
        Ok((lines, mode))
    }
}

/// Returns up to `MAX_FILE` + 1 bytes of a file, and its mode.
fn read_with_mode(file: &Path) -> std::io::Result<(Vec<u8>, u32)> {
    let file = File::open(file)?;
    let mode = file.metadata()?.permissions().mode();
    let mut bytes = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
    Ok((bytes, mode))
}
