//! Encryption: the flags, and the files that they name.

use crate::backup::trust::{Plaintext, Trust};
use crate::base::mounted_secret;
use crate::error::{Reason, Result};
use crate::mvcc::Revision;
use crate::store::Keys;
use crate::store::encryption::{ARMORED, MAGIC, MAX_RECIPIENTS};
use age::x25519::{Identity, Recipient};
use clap::Args;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Who can read snapshots.
#[derive(Debug, Args)]
#[command(next_help_heading = "Encryption")]
pub(super) struct EncryptionArgs {
    /// Encrypt what is written for this age recipient (age1…); may be given again
    #[arg(
        long,
        hide_env_values = true,
        value_name = "RECIPIENT",
        value_delimiter = ','
    )]
    age_recipient: Vec<String>,
    /// Encrypt what is written for the recipients in this file, one a line
    #[arg(long, hide_env_values = true, value_name = "FILE")]
    age_recipients_file: Option<PathBuf>,
    /// A file of age identities (AGE-SECRET-KEY-1…) that open encrypted snapshots; may be given again
    #[arg(
        long,
        hide_env_values = true,
        value_name = "FILE",
        value_delimiter = ','
    )]
    age_identity: Vec<PathBuf>,
    #[command(flatten)]
    plaintext: Plaintext,
}

/// Bytes of a file of keys; a key takes less than a hundred.
const MAX_FILE: u64 = 1 << 20;

impl EncryptionArgs {
    /// What the flags say about snapshots that are not encrypted.
    pub(super) fn trust(&self, keys: &Keys) -> Trust {
        Trust {
            only_encrypted: keys.encrypts() || keys.decrypts(),
            // Who has an identity expects something that is encrypted.
            unless_all_plain: !keys.decrypts(),
            plaintext_below: self.plaintext.allow_plaintext_below.map(Revision),
            ignore_untrusted: self.plaintext.ignore_untrusted,
        }
    }

    /// The keys that the flags name.
    ///
    /// # Errors
    /// `Usage` for what is no recipient, or a secret itself in place of its file; `Configuration` for a file that
    /// cannot be read or holds something else.
    pub(super) fn keys(&self) -> Result<Keys> {
        let mut recipients = Vec::new();
        for text in &self.age_recipient {
            let what = format!("--age-recipient {text} is");
            recipients.push(recipient(text, "--age-recipient", &what, Reason::Usage)?);
        }
        if let Some(file) = &self.age_recipients_file {
            let place = place("--age-recipients-file", file)?;
            // What else the file holds may be a secret.
            let what = format!("{place} holds a line that is");
            for line in lines(file, &place)?.0 {
                recipients.push(recipient(&line, &place, &what, Reason::Configuration)?);
            }
        }
        if recipients.len() > MAX_RECIPIENTS {
            return Err(Reason::Configuration.error(format!(
                "{} age recipients are given, and {MAX_RECIPIENTS} are the most",
                recipients.len()
            )));
        }
        let mut identities = Vec::new();
        for file in &self.age_identity {
            let place = place("--age-identity", file)?;
            let (lines, mode) = lines(file, &place)?;
            for line in lines {
                identities.push(identity(&line, &place)?);
            }
            // Kubernetes lets the group of a Pod read a mounted Secret: that is as it should be.
            if mode & 0o007 != 0 {
                tracing::warn!("{place} can be read by everybody on this machine: chmod 600");
            }
        }
        Ok(Keys::new(identities, recipients))
    }
}

/// Whether a text holds an identity, however it is spelled.
fn holds_secret(text: &str) -> bool {
    text.to_ascii_uppercase().contains("AGE-SECRET-KEY")
}

/// A flag and its file, for people. Somebody may have given the secret instead: it is not shown.
fn place(flag: &str, file: &Path) -> Result<String> {
    let file = file.to_string_lossy();
    match holds_secret(&file) {
        true => Err(Reason::Usage.error(format!(
            "{flag} takes the name of a file, and an identity itself was given: it can be seen in the list of processes, so it is a secret no longer; make another one, in a file"
        ))),
        false => Ok(format!("{flag} {file}")),
    }
}

/// A recipient. `what` begins the message if it is none.
fn recipient(text: &str, place: &str, what: &str, reason: Reason) -> Result<Recipient> {
    if holds_secret(text) {
        return Err(reason.error(format!(
            "{place}: an identity (AGE-SECRET-KEY-1…) stands where a recipient (age1…) belongs: `age-keygen -y` tells the recipient of an identity"
        )));
    }
    let parsed = text.trim().parse();
    parsed.map_err(|e: &str| reason.error(format!("{what} no X25519 recipient (age1…): {e}")))
}

fn identity(line: &str, place: &str) -> Result<Identity> {
    line.parse().map_err(|_| {
        // What is wrong with a secret is not shown.
        let what = match line.starts_with("age1") {
            true => {
                "holds a recipient (age1…), which encrypts only: give the identity that belongs to it"
            }
            false => "holds a line that is no X25519 identity (AGE-SECRET-KEY-1…)",
        };
        Reason::Configuration.error(format!("{place} {what}"))
    })
}

/// The lines of a file, but for empty ones and comments; and its mode.
fn lines(file: &Path, place: &str) -> Result<(Vec<String>, u32)> {
    let wrong = |why: String| Reason::Configuration.error(format!("{place} {why}"));
    let mut bytes = Vec::new();
    let mode = File::open(file)
        .and_then(|file| {
            let mode = file.metadata()?.permissions().mode();
            file.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
            Ok(mode)
        })
        .map_err(|e| match (e.kind(), file.parent(), file.file_name()) {
            // So it is if a Secret is not there, or lacks the key.
            (ErrorKind::NotFound, Some(folder), Some(key))
                if mounted_secret::is_mounted_secret(folder) =>
            {
                let advice = mounted_secret::advice(folder, &key.to_string_lossy());
                wrong(format!("is not there: {advice}"))
            }
            _ => wrong(format!("cannot be read: {e}")),
        })?;
    if bytes.starts_with(MAGIC) || bytes.starts_with(ARMORED) {
        let why = "is encrypted itself: give a file that `age --decrypt` made of it";
        return Err(wrong(why.to_owned()));
    }
    let no_text = || wrong("is no file of age keys".to_owned());
    if bytes.len() as u64 > MAX_FILE {
        return Err(no_text());
    }
    let text = String::from_utf8(bytes).map_err(|_| no_text())?;
    let lines: Vec<String> = text
        .lines()
        .map(str::trim)
        .filter(|l| !l.is_empty() && !l.starts_with('#'))
        .map(str::to_owned)
        .collect();
    match lines.is_empty() {
        true => Err(wrong("holds no key".to_owned())),
        false => Ok((lines, mode)),
    }
}
