//! Long lists, shortened for people.
//!
//! JSON results hold every item; text and messages hold the first, the last and the number of the others.

use crate::base::printable;
use std::fmt::Display;

/// The longest list that is shown whole.
pub(crate) const WHOLE: usize = 10;
/// Items of a longer list that are shown before the last one.
const FIRST: usize = 3;

/// Says that the JSON result holds all items of a list.
pub(crate) const IN_JSON: &str = "--output json has all";
/// Says that the JSON result of `list` holds all items of a list.
pub(crate) const IN_LIST: &str = "`deltafold list --output json` has all";

/// A list, one item a line: whole, or its first items and a line with the last one. `all_in` says where all
/// items are.
pub(crate) fn lines<T: Display>(items: &[T], all_in: &str) -> Vec<String> {
    let whole = |items: &[T]| items.iter().map(one).collect();
    match items {
        [first @ .., last] if items.len() > WHOLE => {
            let mut shown: Vec<String> = whole(&first[..FIRST]);
            shown.push(format!(
                "… {}, {}",
                one(last),
                more(items.len() - FIRST - 1, all_in)
            ));
            shown
        }
        _ => whole(items),
    }
}

/// An item on one line, whatever it is called.
fn one<T: Display>(item: &T) -> String {
    printable::line(&item.to_string()).into_owned()
}

/// A list on one line, with `separator` between its items. `all_in` says where all items are; it may be empty.
pub(crate) fn line<T: Display>(items: &[T], separator: &str, all_in: &str) -> String {
    let whole = |items: &[T]| {
        let items: Vec<String> = items.iter().map(one).collect();
        items.join(separator)
    };
    match items {
        [first @ .., last] if items.len() > WHOLE => {
            let (first, more) = (
                whole(&first[..FIRST]),
                more(items.len() - FIRST - 1, all_in),
            );
            format!("{first} … {} ({more})", one(last))
        }
        _ => whole(items),
    }
}

/// How many others there are: `8,318 more`, and where all are.
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
    fn a_long_list_is_told_by_its_ends_and_its_length() {
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
