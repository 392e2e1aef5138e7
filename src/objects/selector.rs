//! Label selectors, as `kubectl -l` takes them.
//!
//! Source: apimachinery's `pkg/labels`.

use std::collections::BTreeMap;
use std::str::FromStr;

/// Requirements that an object's labels must meet, all of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selector(Vec<Requirement>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Requirement {
    key: String,
    operator: Operator,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Operator {
    Exists,
    DoesNotExist,
    In(Vec<String>),
    /// Also met if there is no such label.
    NotIn(Vec<String>),
}

impl Selector {
    /// Whether labels meet all requirements.
    pub fn matches<'l>(&self, labels: impl Iterator<Item = (&'l str, &'l str)>) -> bool {
        let labels: BTreeMap<&str, &str> = labels.collect();
        self.0.iter().all(|requirement| {
            let value = labels.get(requirement.key.as_str());
            let is_one_of =
                |values: &[String]| value.is_some_and(|v| values.iter().any(|x| x == v));
            match &requirement.operator {
                Operator::Exists => value.is_some(),
                Operator::DoesNotExist => value.is_none(),
                Operator::In(values) => is_one_of(values),
                Operator::NotIn(values) => !is_one_of(values),
            }
        })
    }
}

impl FromStr for Selector {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let requirements: Result<Vec<_>, String> = split(s).into_iter().map(requirement).collect();
        Ok(Selector(requirements?))
    }
}

/// Splits at commas that are not in parentheses.
fn split(s: &str) -> Vec<&str> {
    let mut depth = 0;
    s.split(|c: char| {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        c == ',' && depth == 0
    })
    .collect()
}

fn requirement(s: &str) -> Result<Requirement, String> {
    let s = s.trim();
    let one = |value: &str| vec![value.trim().to_owned()];
    let (key, operator) = if let Some((key, value)) = s.split_once("!=") {
        (key, Operator::NotIn(one(value)))
    } else if let Some((key, value)) = s.split_once("==").or_else(|| s.split_once('=')) {
        (key, Operator::In(one(value)))
    } else if let Some((key, values)) = s.split_once(" notin ") {
        (key, Operator::NotIn(set(values)?))
    } else if let Some((key, values)) = s.split_once(" in ") {
        (key, Operator::In(set(values)?))
    } else if let Some(key) = s.strip_prefix('!') {
        (key, Operator::DoesNotExist)
    } else {
        (s, Operator::Exists)
    };
    let key = key.trim();
    let is_key_char = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    if key.is_empty() || !key.chars().all(is_key_char) {
        return Err(format!(
            "\"{s}\" is not a requirement of labels, such as app=web, app!=web, app, !app or \"app in (a, b)\""
        ));
    }
    Ok(Requirement {
        key: key.to_owned(),
        operator,
    })
}

fn set(values: &str) -> Result<Vec<String>, String> {
    let inner = values
        .trim()
        .strip_prefix('(')
        .and_then(|v| v.strip_suffix(')'));
    let inner = inner.ok_or_else(|| format!("\"{values}\" is not a set such as (a, b)"))?;
    Ok(inner.split(',').map(|v| v.trim().to_owned()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requirements_are_those_of_kubectl() {
        let labels = [("app", "web"), ("a.b/tier", "x")];
        for (selector, expected) in [
            ("app=web", true),
            ("app==web,a.b/tier = x", true),
            ("app!=web", false),
            ("other!=web", true),
            ("app", true),
            ("!app", false),
            ("!other", true),
            ("app in (api, web),a.b/tier notin (y)", true),
            ("app notin (web)", false),
            ("other in (web)", false),
        ] {
            let selector: Selector = selector.parse().unwrap();
            assert_eq!(
                selector.matches(labels.into_iter()),
                expected,
                "{selector:?}"
            );
        }
        for bad in ["", "=a", "a b", "app in a", "a,,b", "app in (a"] {
            assert!(bad.parse::<Selector>().is_err(), "{bad}");
        }
    }
}
