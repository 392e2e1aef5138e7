//! Words of shell commands that are printed for people who copy them.

use super::printable::is_unsafe;
use std::borrow::Cow;
use std::fmt::Write;

/// Returns a command of these words, each [quoted](word) if it needs it.
pub fn command<'w>(words: impl IntoIterator<Item = &'w str>) -> String {
    let words: Vec<_> = words.into_iter().map(word).collect();
    words.join(" ")
}

/// Returns a text as one word of a shell's command. Control characters, and those that change the writing direction,
/// are escaped as bytes in `$'…'`, which bash, zsh and POSIX.1-2024 read.
pub fn word(text: &str) -> Cow<'_, str> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_@%+=:,./-".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return Cow::Borrowed(text);
    }
    if !text.chars().any(is_unsafe) {
        return Cow::Owned(format!("'{}'", text.replace('\'', "'\\''")));
    }
    let mut word = "$'".to_owned();
    for c in text.chars() {
        match c {
            '\'' | '\\' => word.extend(['\\', c]),
            c if is_unsafe(c) => {
                for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                    let _ = write!(word, "\\x{byte:02x}");
                }
            }
            c => word.push(c),
        }
    }
    word.push('\'');
    Cow::Owned(word)
}

#[cfg(test)]
mod tests {
    use super::{command, word};
    use std::process::Command;

    #[test]
    fn a_word_is_quoted_if_needed() {
        assert_eq!(word("s3://b/p-1_x"), "s3://b/p-1_x");
        assert_eq!(word("/my backups"), "'/my backups'");
        assert_eq!(word("a'b$(x)"), "'a'\\''b$(x)'");
        assert_eq!(word(""), "''");
        assert_eq!(word("a'\u{1b}\\"), "$'a\\'\\x1b\\\\'");
    }

    #[test]
    fn a_tenants_name_runs_nothing_in_the_operators_shell() {
        let name = "a;touch x$(y)`z`>f\n&\u{1b}[2J\u{202e}'\"\\ü|#*?~!{a,b}\r\t";
        let shown = command(["printf", "%s", name]);
        assert!(!shown.chars().any(super::is_unsafe), "{shown}");
        let printed = Command::new("bash").args(["-c", &shown]).output().unwrap();
        assert_eq!(String::from_utf8(printed.stdout).unwrap(), name);
    }
}
