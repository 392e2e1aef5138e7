//! Paths to values in an object: the simple part of kubectl's JSONPath.
//!
//! Every step leads from a value to values directly inside it. A path therefore finds each value at most once, and what
//! it finds is never larger than the object. `columns` calls it.
//!
//! Source: client-go's `util/jsonpath`. Unlike there, a dot within quotes (`['a.b']`) is a part of the name, also
//! without a backslash before it.

use serde_json::Value;

/// The longest path, in characters.
const MAX_CHARS: usize = 1000;
/// The largest number of steps in a path, and in the path of a filter.
const MAX_STEPS: usize = 32;

/// A path to values in an object.
#[derive(Debug, Clone, PartialEq)]
pub struct JsonPath(Vec<Step>);

/// A step from a value to values inside it.
#[derive(Debug, Clone, PartialEq)]
enum Step {
    /// `.name` or `['name']`: a field of an object.
    Field(String),
    /// `[0]`: an element of a list. A negative index counts from the end.
    Index(i64),
    /// `[*]` or `.*`: all elements of a list, or all fields of an object.
    All,
    /// `[?(@.name=="x")]`: the elements of a list that meet a condition.
    Filter(Filter),
}

/// A condition of elements of a list.
#[derive(Debug, Clone, PartialEq)]
struct Filter {
    /// Leads to at most one value of the element. An element without this value is never accepted.
    path: JsonPath,
    /// What the value is compared with; `None` if any value is accepted.
    comparison: Option<Comparison>,
}

#[derive(Debug, Clone, PartialEq)]
struct Comparison {
    is_equal: bool,
    /// A string, a number or a boolean.
    literal: Value,
}

impl JsonPath {
    /// Parses a path such as `.status.conditions[?(@.type=="Ready")].status`. `$` at the beginning and braces around
    /// the path may be left out, and so may the first dot.
    ///
    /// # Errors
    /// Fails with the part of the path that is damaged or not supported, in words.
    pub fn parse(text: &str) -> Result<JsonPath, String> {
        if text.chars().nth(MAX_CHARS).is_some() {
            return Err(format!("the path has more than {MAX_CHARS} characters"));
        }
        let braced = text.strip_prefix('{').and_then(|t| t.strip_suffix('}'));
        let path = braced.unwrap_or(text).trim();
        let steps_text = match path.strip_prefix('$').unwrap_or(path) {
            "" if path.is_empty() => return Err("the path is empty".to_owned()),
            // The whole object.
            "" | "." => return Ok(JsonPath(Vec::new())),
            rest if path.starts_with(['$', '.', '[']) => rest.to_owned(),
            rest => format!(".{rest}"),
        };
        let (steps, rest) = steps(&steps_text)?;
        if rest.is_empty() {
            Ok(JsonPath(steps))
        } else if rest.starts_with('(') {
            Err(unsupported("a function"))
        } else if rest.starts_with([' ', '{', '}']) {
            Err(unsupported("a template, such as range and end,"))
        } else {
            Err(format!("no step of a path begins with \"{rest}\""))
        }
    }

    /// Returns the values to which the path leads, in the order of the object. A missing field or element gives no
    /// value.
    pub fn values<'v>(&self, object: &'v Value) -> Vec<&'v Value> {
        let mut found = vec![object];
        for step in &self.0 {
            let mut inside = Vec::new();
            for value in found {
                match (step, value) {
                    (Step::Field(name), Value::Object(fields)) => inside.extend(fields.get(name)),
                    (Step::Index(index), Value::Array(list)) => {
                        inside.extend(element(list, *index))
                    }
                    (Step::All, Value::Object(fields)) => inside.extend(fields.values()),
                    (Step::All, Value::Array(list)) => inside.extend(list),
                    (Step::Filter(filter), Value::Array(list)) => {
                        inside.extend(list.iter().filter(|element| filter.accepts(element)));
                    }
                    _ => {}
                }
            }
            found = inside;
        }
        found
    }
}

impl Filter {
    fn accepts(&self, element: &Value) -> bool {
        let values = self.path.values(element);
        values.first().is_some_and(|&value| {
            let comparison = self.comparison.as_ref();
            comparison.is_none_or(|c| (*value == c.literal) == c.is_equal)
        })
    }
}

fn element(list: &[Value], index: i64) -> Option<&Value> {
    let index = if index < 0 {
        index + list.len() as i64
    } else {
        index
    };
    list.get(usize::try_from(index).ok()?)
}

fn unsupported(what: &str) -> String {
    format!(
        "{what} is not supported: only fields, indexes, * and filters such as [?(@.name==\"x\")] are"
    )
}

/// Parses steps up to the first character that begins no step. Returns the rest of the text, too.
fn steps(text: &str) -> Result<(Vec<Step>, &str), String> {
    let mut steps = Vec::new();
    let mut rest = text;
    while rest.starts_with(['.', '[']) {
        if steps.len() == MAX_STEPS {
            return Err(format!("the path has more than {MAX_STEPS} steps"));
        }
        let (step, after) = match rest.strip_prefix('.') {
            Some(name) => field(name)?,
            None => bracket(&rest[1..])?,
        };
        steps.push(step);
        rest = after;
    }
    Ok((steps, rest))
}

/// Parses a field after its dot.
fn field(text: &str) -> Result<(Step, &str), String> {
    if text.starts_with('.') {
        return Err(unsupported("recursive descent (..)"));
    }
    if let Some(rest) = text.strip_prefix('*') {
        return Ok((Step::All, rest));
    }
    let (name, rest) = until(text, |c| {
        c.is_whitespace() || ".[](){}'\",:=!<>&|*?@$".contains(c)
    })?;
    if name.is_empty() {
        return Err(format!("a field has no name before \"{rest}\""));
    }
    Ok((Step::Field(name), rest))
}

/// Parses a step in brackets after the opening one.
fn bracket(text: &str) -> Result<(Step, &str), String> {
    if let Some(condition) = text.strip_prefix("?(") {
        return filter(condition);
    }
    let (step, rest) = if text.starts_with(['\'', '"']) {
        let (name, rest) = quoted(text)?;
        (Step::Field(name), rest)
    } else {
        let (inside, rest) = text.split_at(text.find([']', ',']).unwrap_or(text.len()));
        let step = match inside.parse() {
            Ok(index) => Step::Index(index),
            Err(_) if inside == "*" => Step::All,
            // The only slice that columns use: the last element.
            Err(_) if inside == "-1:" => Step::Index(-1),
            Err(_) if inside.contains(':') => return Err(unsupported("a slice ([a:b])")),
            Err(_) => return Err(format!("\"{inside}\" is no index")),
        };
        (step, rest)
    };
    if rest.starts_with(',') {
        return Err(unsupported("a union ([a,b])"));
    }
    let rest = rest.strip_prefix(']');
    Ok((step, rest.ok_or("a bracket is not closed")?))
}

/// Parses a filter after `[?(`.
fn filter(text: &str) -> Result<(Step, &str), String> {
    let path = text.trim_start().strip_prefix('@');
    let (path, rest) = steps(path.ok_or("a condition does not begin with @")?)?;
    let is_single = |step: &Step| matches!(step, Step::Field(_) | Step::Index(_));
    if !path.iter().all(is_single) {
        return Err(unsupported("* or a filter in a condition"));
    }
    let rest = rest.trim_start();
    let equal = rest.strip_prefix("==").map(|literal| (true, literal));
    let operator = equal.or_else(|| rest.strip_prefix("!=").map(|literal| (false, literal)));
    let (comparison, rest) = match operator {
        Some((is_equal, text)) => {
            let (literal, rest) = literal(text.trim_start())?;
            (Some(Comparison { is_equal, literal }), rest)
        }
        None => (None, rest),
    };
    let rest = rest.trim_start().strip_prefix(")]");
    let rest = rest.ok_or_else(|| unsupported("a condition other than == and !="))?;
    let path = JsonPath(path);
    Ok((Step::Filter(Filter { path, comparison }), rest))
}

/// Parses a string in quotes, a number or a boolean.
fn literal(text: &str) -> Result<(Value, &str), String> {
    if text.starts_with(['\'', '"']) {
        let (string, rest) = quoted(text)?;
        return Ok((Value::String(string), rest));
    }
    let (word, rest) = text.split_at(text.find([' ', ')']).unwrap_or(text.len()));
    match serde_json::from_str(word) {
        Ok(literal @ (Value::Number(_) | Value::Bool(_))) => Ok((literal, rest)),
        _ => Err(format!(
            "\"{word}\" is neither a string in quotes nor a number, true or false"
        )),
    }
}

/// Parses a string in quotes. The text begins with the quote.
fn quoted(text: &str) -> Result<(String, &str), String> {
    let (quote, text) = text.split_at(1);
    let (string, rest) = until(text, |c| quote.contains(c))?;
    let rest = rest.strip_prefix(quote);
    Ok((string, rest.ok_or("a string is not closed")?))
}

/// Returns the text before the first character that ends it, and the rest from this character on. A backslash before
/// any character but a letter or a digit stands for this character, which then ends nothing.
fn until(text: &str, is_end: impl Fn(char) -> bool) -> Result<(String, &str), String> {
    let mut before = String::new();
    let mut chars = text.chars();
    loop {
        let rest = chars.as_str();
        match chars.next() {
            None => return Ok((before, rest)),
            Some(c) if is_end(c) => return Ok((before, rest)),
            Some('\\') => match chars.next() {
                Some(c) if !c.is_alphanumeric() => before.push(c),
                _ => {
                    return Err("a backslash stands before a letter, a digit or the end".to_owned());
                }
            },
            Some(c) => before.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn paths_lead_to_values() {
        let object = json!({
            "metadata": {"name": "a", "annotations": {"example.com/x": "dot", "it's": "quote"}},
            "spec": {"size": 3, "none": null, "list": [[1, 2], [3]]},
            "status": {"conditions": [
                {"type": "Other", "status": "False", "at": {"n": 1}, "is": true},
                {"type": "Ready", "status": "True", "at": {"n": 2.5}, "is": false},
                {"type": "Late", "status": "Unknown"},
            ]},
        });
        let cases: &[(&str, Value)] = &[
            (".spec.size", json!([3])),
            ("spec.size", json!([3])),
            ("$.spec.size", json!([3])),
            ("{.spec.size}", json!([3])),
            ("{ $['spec'][\"size\"] }", json!([3])),
            ("['spec'].size", json!([3])),
            (".spec.none", json!([null])),
            (".spec.missing", json!([])),
            (".spec.size.deeper", json!([])),
            (".spec[0]", json!([])),
            (".spec.list.size", json!([])),
            (r".metadata.annotations.example\.com/x", json!(["dot"])),
            (r".metadata.annotations['example\.com/x']", json!(["dot"])),
            (".metadata.annotations['example.com/x']", json!(["dot"])),
            (r".metadata.annotations['it\'s']", json!(["quote"])),
            (".metadata.annotations[\"it's\"]", json!(["quote"])),
            (".metadata.annotations.*", json!(["dot", "quote"])),
            (".metadata.annotations[*]", json!(["dot", "quote"])),
            (".spec.list[0]", json!([[1, 2]])),
            (".spec.list[-1][0]", json!([3])),
            (".spec.list[-1:][0]", json!([3])),
            (".spec.list[-2][-1]", json!([2])),
            (".spec.list[-3]", json!([])),
            (".spec.list[2]", json!([])),
            (".spec.list[9223372036854775807]", json!([])),
            (".spec.list[-9223372036854775808]", json!([])),
            (".spec.list[*][*]", json!([1, 2, 3])),
            (".spec.list.*.*", json!([1, 2, 3])),
            (".spec.size[*]", json!([])),
            (
                ".status.conditions[?(@.type==\"Ready\")].status",
                json!(["True"]),
            ),
            (
                ".status.conditions[?( @.type == 'Ready' )].status",
                json!(["True"]),
            ),
            (
                ".status.conditions[?(@.type!=\"Ready\")].type",
                json!(["Other", "Late"]),
            ),
            (".status.conditions[?(@.at.n==1)].type", json!(["Other"])),
            (".status.conditions[?(@.at.n==2.5)].type", json!(["Ready"])),
            (".status.conditions[?(@.at.n!=1)].type", json!(["Ready"])),
            (".status.conditions[?(@.is==false)].type", json!(["Ready"])),
            (
                ".status.conditions[?(@.at)].type",
                json!(["Other", "Ready"]),
            ),
            (".status.conditions[?(@['type']=='x')]", json!([])),
            (".spec.list[*][?(@==3)]", json!([3])),
            (".spec.list[?(@[1])]", json!([[1, 2]])),
            (".spec[?(@.size)]", json!([])),
        ];
        for (path, expected) in cases {
            let parsed = JsonPath::parse(path).unwrap_or_else(|e| panic!("{path}: {e}"));
            assert_eq!(json!(parsed.values(&object)), *expected, "{path}");
        }
        for whole in ["$", ".", "{.}", "{$}"] {
            assert_eq!(JsonPath::parse(whole).unwrap().values(&object), [&object]);
        }
    }

    #[test]
    fn other_paths_are_refused_in_words() {
        let (long, deep) = (".a".repeat(501), ".a".repeat(33));
        let cases = [
            ("", "empty"),
            ("{}", "empty"),
            ("..a", "recursive descent"),
            (".a..b", "recursive descent"),
            ("..*..*..*..*", "recursive descent"),
            (".a[?(@..b)]", "recursive descent"),
            (".a[0:2]", "slice"),
            (".a[-2:]", "slice"),
            (".a[0,1]", "union"),
            (".a['b','c']", "union"),
            (".a.length()", "function"),
            ("{range .items[*]}{.a}{end}", "template"),
            ("{.a}{.b}", "template"),
            (".a .b", "template"),
            (".a.", "no name"),
            (".a.[0]", "no name"),
            (".a=b", "no step"),
            (".a]", "no step"),
            (".a[0]b", "no step"),
            ("$a", "no step"),
            (".spec[", "no index"),
            (".a[]", "no index"),
            (".a[b]", "no index"),
            (".a[9223372036854775808]", "no index"),
            (".a[?@.b]", "no index"),
            (".a[(@.length-1)]", "no index"),
            (".a[0", "not closed"),
            (".a['b", "not closed"),
            (".a['b'", "not closed"),
            (".a\\", "backslash"),
            (".a\\n", "backslash"),
            (".a[?(.b)]", "@"),
            (".a[?(@.b>1)]", "condition"),
            (".a[?(@.b==1 && @.c==2)]", "condition"),
            (".a[?(@.b", "condition"),
            (".a[?(@.b==1", "condition"),
            (".a[?(@.b[*]==1)]", "condition"),
            (".a[?(@.b[?(@.c)])]", "condition"),
            (".a[?(@.b==null)]", "neither"),
            (".a[?(@.b==x)]", "neither"),
            (".a[?(@.b==)]", "neither"),
            (&long, "more than 1000 characters"),
            (&deep, "more than 32 steps"),
        ];
        for (path, why) in cases {
            let refused = JsonPath::parse(path).expect_err(path);
            assert!(refused.contains(why), "{path}: {refused}");
        }
    }
}
