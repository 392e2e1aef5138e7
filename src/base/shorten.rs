//! Shortens long lists in text output and messages: the first items, the last one, and the number of the
//! others.
//!
//! JSON results are never shortened.

use crate::base::printable;
use std::fmt::Display;

/// The length of the longest list that is not shortened.
pub(crate) const WHOLE: usize = 10;
/// How many of the first items a shortened list shows.
pub(crate) const FIRST: usize = 3;

/// The hint that the JSON result of the command holds the whole list.
pub(crate) const IN_JSON: &str = "--output json has all";
/// The hint that the JSON result of `list` holds the whole list.
pub(crate) const IN_LIST: &str = "`deltafold list --output json` has all";

/// Formats a list with one item a line; the last line of a shortened list holds the last item and the number
/// of omitted ones. `all_in` says where the whole list is.
pub(crate) fn lines<T: Display>(items: &[T], all_in: &str) -> Vec<String> {
    match items {
        [first @ .., last] if items.len() > WHOLE => {
            let mut shown = escaped(&first[..FIRST]);
            let omitted = more(items.len() - FIRST - 1, all_in);
            shown.push(format!("… {}, {omitted}", escape(last)));
            shown
        }
        _ => escaped(items),
    }
}

/// Formats a list on one line, with `separator` between the items. `all_in` says where the whole list is; it
/// may be empty.
pub(crate) fn line<T: Display>(items: &[T], separator: &str, all_in: &str) -> String {
    match items {
        [first @ .., last] if items.len() > WHOLE => {
            let first = escaped(&first[..FIRST]).join(separator);
            let omitted = more(items.len() - FIRST - 1, all_in);
            format!("{first} … {} ({omitted})", escape(last))
        }
        _ => escaped(items).join(separator),
    }
}

fn escaped<T: Display>(items: &[T]) -> Vec<String> {
    items.iter().map(escape).collect()
}

/// An item on one line, without control characters.
fn escape<T: Display>(item: &T) -> String {
    printable::line(&item.to_string()).into_owned()
}

/// Formats the number of omitted items and the hint: `8,318 more: --output json has all`.
pub(crate) fn more(others: usize, all_in: &str) -> String {
    let others = indicatif::HumanCount(others as u64);
    match all_in {
        "" => format!("{others} more"),
        all_in => format!("{others} more: {all_in}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_more_than_ten_items_is_shortened() {
        let items: Vec<usize> = (1..=8_322).collect();
        assert_eq!(lines(&items[..1], IN_JSON), ["1"]);
        assert_eq!(lines(&items[..WHOLE], IN_JSON).len(), WHOLE);
        let expected = ["1", "2", "3", "… 11, 7 more: --output json has all"];
        assert_eq!(lines(&items[..WHOLE + 1], IN_JSON), expected);
        let expected = ["1", "2", "3", "… 8322, 8,318 more: --output json has all"];
        assert_eq!(lines(&items, IN_JSON), expected);
        assert!(lines(&items[..0], IN_JSON).is_empty());

        assert_eq!(line(&items[..2], ", ", ""), "1, 2");
        assert_eq!(line(&items, ", ", ""), "1, 2, 3 … 8322 (8,318 more)");
        let expected = "1; 2; 3 … 8322 (8,318 more: `deltafold list --output json` has all)";
        assert_eq!(line(&items, "; ", IN_LIST), expected);
    }
}
