//! Words of shell commands that messages show.

use std::borrow::Cow;

/// Returns a text as one word of a POSIX shell's command, quoted if it needs it.
pub fn word(text: &str) -> Cow<'_, str> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_@%+=:,./-".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(format!("'{}'", text.replace('\'', "'\\''")))
}

#[cfg(test)]
mod tests {
    use super::word;

    #[test]
    fn a_word_is_quoted_if_needed() {
        assert_eq!(word("s3://b/p-1_x"), "s3://b/p-1_x");
        assert_eq!(word("/my backups"), "'/my backups'");
        assert_eq!(word("a'b$(x)"), "'a'\\''b$(x)'");
        assert_eq!(word(""), "''");
    }
}
