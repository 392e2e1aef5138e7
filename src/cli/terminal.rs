//! Colour and width of the terminal.
//!
//! Whether there is colour is decided by anstream: NO_COLOR, CLICOLOR, CLICOLOR_FORCE and TERM. Text carries
//! marks for its styles; [`render`] escapes the text and replaces the marks.

use crate::base::printable::escape_unsafe;
use anstream::{AutoStream, ColorChoice};
use anstyle::AnsiColor::{Cyan, Green, Red, Yellow};
use std::io::IsTerminal;
use std::os::fd::AsFd;

/// How a piece of text stands out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// A verdict: all is well
    Good,
    /// A verdict: something failed; an error
    Bad,
    /// A warning, or a gap
    Warning,
    /// A headline or an important row
    Strong,
    /// A key that was added
    Added,
    /// A key that was changed
    Changed,
    /// A key that was deleted
    Deleted,
    /// A remark about a list
    Remark,
}

/// All styles; a mark is the position in this list.
const STYLES: [Style; 8] = [
    Style::Good,
    Style::Bad,
    Style::Warning,
    Style::Strong,
    Style::Added,
    Style::Changed,
    Style::Deleted,
    Style::Remark,
];

/// The marks are noncharacters of Unicode, which `printable` escapes in all content.
const FIRST_MARK: char = '\u{fdd0}';
const END_MARK: char = '\u{fddf}';

impl Style {
    fn mark(self) -> char {
        let nth = STYLES.iter().position(|s| *s == self).unwrap_or(0) as u32;
        char::from_u32(FIRST_MARK as u32 + nth).unwrap_or(FIRST_MARK)
    }

    fn of_mark(c: char) -> Option<Style> {
        let nth = (c as u32).checked_sub(FIRST_MARK as u32)?;
        STYLES.get(nth as usize).copied()
    }

    fn ansi(self) -> anstyle::Style {
        match self {
            Style::Good => Green.on_default().bold(),
            Style::Bad => Red.on_default().bold(),
            Style::Warning => Yellow.on_default().bold(),
            Style::Strong => anstyle::Style::new().bold(),
            Style::Added => Green.on_default(),
            Style::Changed => Yellow.on_default(),
            Style::Deleted => Red.on_default(),
            Style::Remark => Cyan.on_default(),
        }
    }
}

/// Whether a character is a mark of this module.
pub(super) fn is_mark(c: char) -> bool {
    c == END_MARK || Style::of_mark(c).is_some()
}

/// Encloses a text in the marks of a style. The text is escaped already.
pub(super) fn marked(style: Style, text: &str) -> String {
    format!("{}{text}{END_MARK}", style.mark())
}

/// Replaces the marks of a text by colours, or removes them, and escapes all other control characters except line
/// feeds and tabs.
pub(super) fn render(text: &str, in_colour: bool) -> String {
    let escaped = escape_unsafe(text, |c| matches!(c, '\n' | '\t') || is_mark(c));
    let mut rendered = String::with_capacity(escaped.len());
    for c in escaped.chars() {
        match Style::of_mark(c) {
            Some(style) if in_colour => rendered += &style.ansi().render().to_string(),
            None if c == END_MARK && in_colour => rendered += &anstyle::Reset.render().to_string(),
            None if c != END_MARK => rendered.push(c),
            _ => {}
        }
    }
    rendered
}

/// A text for standard output in a style, if there is colour. The text is escaped already.
pub(super) fn painted(style: Style, text: &str, in_colour: bool) -> String {
    if in_colour {
        format!("{}{text}{}", style.ansi().render(), anstyle::Reset.render())
    } else {
        text.to_owned()
    }
}

/// Whether standard output has colour.
pub(super) fn stdout_has_colour() -> bool {
    is_coloured(AutoStream::choice(&std::io::stdout()))
}

/// Whether standard error has colour.
pub(super) fn stderr_has_colour() -> bool {
    is_coloured(AutoStream::choice(&std::io::stderr()))
}

fn is_coloured(choice: ColorChoice) -> bool {
    !matches!(choice, ColorChoice::Never)
}

/// Whether a reader sees standard output and standard error at once, on a terminal.
pub(super) fn is_shared() -> bool {
    std::io::stdout().is_terminal() && std::io::stderr().is_terminal()
}

/// The narrowest width that text is wrapped at, in characters.
const NARROWEST: usize = 40;

/// Returns the width in characters at which text on standard output is wrapped: that of the terminal, otherwise
/// the variable COLUMNS. `None`: the output is not wrapped, because a program reads it.
pub(super) fn stdout_width() -> Option<usize> {
    width(std::io::stdout())
}

/// The same for standard error.
pub(super) fn stderr_width() -> Option<usize> {
    width(std::io::stderr())
}

fn width(stream: impl AsFd) -> Option<usize> {
    let of_terminal = rustix::termios::tcgetwinsize(stream).ok();
    let of_terminal = of_terminal.map(|size| usize::from(size.ws_col));
    let columns = || std::env::var("COLUMNS").ok()?.parse().ok();
    let width = of_terminal.filter(|w| *w > 0).or_else(columns)?;
    Some(width.max(NARROWEST))
}

/// The width of a text in characters, without marks.
pub(super) fn width_of(text: &str) -> usize {
    text.chars().filter(|c| !is_mark(*c)).count()
}

/// Wraps a line at spaces. Lines after the first one are indented by `indent`. A word that is too long stays
/// whole, since it may be a name or a command.
pub(super) fn wrap(line: &str, width: usize, indent: usize) -> String {
    if width_of(line) <= width {
        return line.to_owned();
    }
    let mut wrapped = String::with_capacity(line.len() + 16);
    let mut column = 0;
    // Whether the line has a word already: an indent is no place for a break.
    let mut has_word = false;
    for (nth, word) in line.split(' ').enumerate() {
        let word_width = width_of(word);
        if nth > 0 {
            let breaks = has_word && word_width > 0 && column + 1 + word_width > width;
            if breaks {
                let end = wrapped.trim_end_matches(' ').len();
                wrapped.truncate(end);
                wrapped.push('\n');
                wrapped.extend(std::iter::repeat_n(' ', indent));
                column = indent;
                has_word = false;
            } else {
                wrapped.push(' ');
                column += 1;
            }
        }
        wrapped += word;
        column += word_width;
        has_word |= word_width > 0;
    }
    wrapped
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::printable;

    #[test]
    fn marks_become_colours_and_nothing_else_does() {
        let text = format!("{}: x\n", marked(Style::Bad, "failed"));
        assert_eq!(render(&text, false), "failed: x\n");
        assert_eq!(
            render(&text, true),
            "\u{1b}[1m\u{1b}[31mfailed\u{1b}[0m: x\n"
        );
        // A backup cannot forge a mark: content is escaped before it is marked.
        let hostile = format!("{}\u{1b}[31mx{END_MARK}", Style::Good.mark());
        let content = printable::line(&hostile);
        assert!(!content.chars().any(is_mark), "{content}");
        let shown = render(&marked(Style::Strong, &content), true);
        assert_eq!(shown.matches('\u{1b}').count(), 2, "{shown}");
        for style in STYLES {
            assert_eq!(Style::of_mark(style.mark()), Some(style));
            assert_eq!(render(&marked(style, "x"), false), "x");
        }
    }

    #[test]
    fn lines_are_wrapped_at_spaces_and_words_stay_whole() {
        assert_eq!(wrap("one two three", 80, 2), "one two three");
        assert_eq!(wrap("one two three", 8, 2), "one two\n  three");
        assert_eq!(wrap("  a  bb cc dd", 8, 5), "  a  bb\n     cc\n     dd");
        let long = format!("see {} now", "x".repeat(50));
        let expected = format!("see\n  {}\n  now", "x".repeat(50));
        assert_eq!(wrap(&long, 20, 2), expected);
        // Marks have no width.
        let text = marked(Style::Bad, "failed") + " now";
        assert_eq!(wrap(&text, 10, 2), text);
    }
}
