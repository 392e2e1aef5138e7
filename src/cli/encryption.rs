//! Encryption: the flags, and the files that they name.

use crate::error::{Error, Reason, Result};
use crate::store::Keys;
use age::x25519::{Identity, Recipient};
use clap::Args;
use std::path::{Path, PathBuf};

/// Who can read snapshots.
#[derive(Debug, Args)]
#[command(next_help_heading = "Encryption")]
pub(super) struct EncryptionArgs {
    /// Encrypt what is written for this age recipient (age1…); may be given again
    #[arg(
        long,
        env = "DELTAFOLD_AGE_RECIPIENT",
        value_name = "RECIPIENT",
        value_delimiter = ','
    )]
    age_recipient: Vec<String>,
    /// Encrypt what is written for the recipients in this file, one a line
    #[arg(long, env = "DELTAFOLD_AGE_RECIPIENTS_FILE", value_name = "FILE")]
    age_recipients_file: Option<PathBuf>,
    /// A file of age identities (AGE-SECRET-KEY-1…) that open encrypted snapshots; may be given again
    #[arg(
        long,
        env = "DELTAFOLD_AGE_IDENTITY",
        value_name = "FILE",
        value_delimiter = ','
    )]
    age_identity: Vec<PathBuf>,
}

impl EncryptionArgs {
    /// The keys that the flags name.
    ///
    /// # Errors
    /// `Usage` for what is no recipient or identity; `Configuration` for a file that cannot be read.
    pub(super) fn keys(&self) -> Result<Keys> {
        let mut recipients = Vec::new();
        for text in &self.age_recipient {
            recipients.push(recipient(text, "--age-recipient")?);
        }
        if let Some(file) = &self.age_recipients_file {
            let place = format!("--age-recipients-file {}", file.display());
            for line in lines(file, &place)? {
                recipients.push(recipient(&line, &place)?);
            }
        }
        let mut identities = Vec::new();
        for file in &self.age_identity {
            let place = format!("--age-identity {}", file.display());
            for line in lines(file, &place)? {
                // What is wrong with a secret is not shown.
                let identity: Identity = line.parse().map_err(|_| {
                    let why = "holds a line that is no X25519 identity (AGE-SECRET-KEY-1…)";
                    Error::new(Reason::Configuration, format!("{place} {why}"))
                })?;
                identities.push(identity);
            }
        }
        Ok(Keys::new(identities, recipients))
    }
}

fn recipient(text: &str, place: &str) -> Result<Recipient> {
    text.trim().parse().map_err(|e| {
        // Somebody may have given the identity instead.
        let shown = match text.to_ascii_uppercase().contains("SECRET") {
            true => "what is given",
            false => text,
        };
        Error::new(
            Reason::Usage,
            format!("{place}: {shown} is no X25519 recipient (age1…): {e}"),
        )
    })
}

/// The lines of a file, but for empty ones and comments.
fn lines(file: &Path, place: &str) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(file).map_err(|e| {
        Error::new(
            Reason::Configuration,
            format!("{place} cannot be read: {e}"),
        )
    })?;
    let lines: Vec<String> = text
        .lines()
        .map(str::trim)
        .filter(|l| !l.is_empty() && !l.starts_with('#'))
        .map(str::to_owned)
        .collect();
    match lines.is_empty() {
        true => Err(Error::new(
            Reason::Configuration,
            format!("{place} holds no key"),
        )),
        false => Ok(lines),
    }
}
