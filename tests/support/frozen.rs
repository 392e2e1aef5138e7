//! The promises in `fixtures/frozen`, one folder for each released version, and how today's program is compared
//! with them.
//!
//! A promise is one line of text. Lines may be added, never lost.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Promises, one per line.
pub type Facts = BTreeSet<String>;

/// The explanation in every failure.
pub const PROMISE: &str = "Frozen files are a promise to users: what a released program wrote, and what it took, works in \
    every later version. Do not change the files; CONTRIBUTING.md says how a name is replaced";

/// Returns the folders of the frozen versions.
pub fn versions() -> Vec<PathBuf> {
    let folders = fs::read_dir(super::fixtures_dir().join("frozen")).expect("the frozen versions");
    let folders = folders.map(|f| f.expect("a folder").path());
    let mut folders: Vec<PathBuf> = folders.filter(|f| f.is_dir()).collect();
    folders.sort();
    assert!(!folders.is_empty());
    folders
}

/// Returns paths and texts of the files in a folder of a version.
pub fn files(version: &Path, folder: &str) -> Vec<(PathBuf, String)> {
    let there = fs::read_dir(version.join(folder)).into_iter().flatten();
    let paths = there.map(|f| f.expect("a file").path());
    let read = |path: PathBuf| (path.clone(), fs::read_to_string(path).expect("text"));
    let mut files: Vec<_> = paths.map(read).collect();
    files.sort();
    files
}

/// Asserts that every line of every version's `file` is still true. With DELTAFOLD_TEST_FREEZE=VERSION, freezes
/// today's facts first.
#[track_caller]
pub fn must_hold(file: &str, facts: &Facts) {
    if let Ok(version) = std::env::var("DELTAFOLD_TEST_FREEZE") {
        let path = super::fixtures_dir()
            .join("frozen")
            .join(version)
            .join(file);
        assert!(!path.exists(), "{} is frozen already", path.display());
        let lines: String = facts.iter().map(|f| format!("{f}\n")).collect();
        fs::write(path, lines).expect("freeze");
    }
    for version in versions() {
        let text = fs::read_to_string(version.join(file)).unwrap_or_default();
        no_fact_is_lost(file, &text.lines().map(str::to_owned).collect(), facts);
    }
}

/// Asserts that every fact of `then` is in `now`.
#[track_caller]
pub fn no_fact_is_lost(file: &str, then: &Facts, now: &Facts) {
    let lost: Vec<&str> = then.difference(now).map(String::as_str).collect();
    let what = lost.join("\n  ");
    assert!(lost.is_empty(), "of {file} is lost:\n  {what}\n{PROMISE}.");
}

/// Asserts that `now`, made from frozen input, equals the frozen result except for new fields.
#[track_caller]
pub fn is_frozen(version: &Path, file: &str, now: &Value) {
    is_same(version, file, &then(version, file, now), now);
}

/// Asserts that `now` keeps what `then` promised.
#[track_caller]
pub fn is_same(version: &Path, file: &str, then: &Value, now: &Value) {
    let mut other = Vec::new();
    differences(then, now, "", &mut other);
    let (path, other_is) = (version.join(file), other.join("\n  "));
    assert!(
        other.is_empty(),
        "{} differs:\n  {other_is}\n{PROMISE}.",
        path.display()
    );
}

/// Returns the frozen value of a version. With DELTAFOLD_TEST_FREEZE=VERSION, freezes today's value first.
#[track_caller]
pub fn then(version: &Path, file: &str, now: &Value) -> Value {
    let path = version.join(file);
    if std::env::var("DELTAFOLD_TEST_FREEZE").is_ok_and(|v| version.ends_with(v)) {
        assert!(!path.exists(), "{} is frozen already", path.display());
        let text = serde_json::to_string_pretty(now).expect("JSON");
        fs::write(&path, text + "\n").expect("freeze");
    }
    let text = fs::read_to_string(&path).expect("what is frozen");
    serde_json::from_str(&text).expect("JSON")
}

/// Collects what `then` has and `now` lacks.
pub fn differences(then: &Value, now: &Value, at: &str, found: &mut Vec<String>) {
    match (then, now) {
        (Value::Object(a), Value::Object(_)) => {
            for (name, value) in a {
                differences(value, &now[name], &format!("{at}/{name}"), found);
            }
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            for (i, (a, b)) in a.iter().zip(b).enumerate() {
                differences(a, b, &format!("{at}/{i}"), found);
            }
        }
        _ if then == now => {}
        _ => found.push(format!("{at}: {then} was, {now} is")),
    }
}

/// Who is bound by a schema.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The program writes it: no field is removed or changes its type or becomes nullable.
    Output,
    /// Users write it: what was accepted is still accepted and means the same.
    Input,
}

/// The meaning of a schema, independent of its layout.
#[derive(Clone, Default)]
struct Shape {
    /// `None`: any type.
    types: Option<BTreeSet<String>>,
    /// The allowed texts.
    values: BTreeSet<String>,
    /// Fields of an object. `[]` stands for the elements of an array, `*` for any other field.
    fields: BTreeMap<String, Field>,
    /// Validation rules of Kubernetes, and the default.
    rules: BTreeSet<String>,
}

#[derive(Clone, Default)]
struct Field {
    shape: Shape,
    /// Whether the field is always present.
    always: bool,
}

/// Returns the promises of a JSON schema, with `$ref`, `allOf`, `anyOf` and `oneOf` resolved.
pub fn of_schema(name: &str, schema: &Value, side: Side) -> Facts {
    let mut facts = Facts::new();
    Shape::of(schema, schema, 0).tell(name, side, &mut facts);
    facts
}

impl Shape {
    fn of(schema: &Value, root: &Value, depth: usize) -> Self {
        // A schema may refer to itself.
        if depth > 40 {
            return Shape::default();
        }
        let of = |schema| Shape::of(schema, root, depth + 1);
        let list = |key: &str| schema[key].as_array().map_or(&[][..], Vec::as_slice);
        let named: Vec<&Value> = schema
            .get("const")
            .into_iter()
            .chain(list("enum"))
            .collect();
        let types: BTreeSet<String> = match &schema["type"] {
            Value::String(one) => [one.clone()].into(),
            Value::Array(all) => all.iter().map(text).collect(),
            _ => named.iter().map(|v| type_of(v).to_owned()).collect(),
        };
        let mut shape = Shape {
            types: (!types.is_empty()).then_some(types),
            values: named
                .iter()
                .filter(|v| v.is_string())
                .map(|v| text(v))
                .collect(),
            ..Shape::default()
        };
        let properties = schema["properties"].as_object().into_iter().flatten();
        let others = [
            ("[]", &schema["items"]),
            ("*", &schema["additionalProperties"]),
        ];
        let others = others.into_iter().filter(|(_, s)| s.is_object());
        for (name, below) in properties.map(|(n, s)| (n.as_str(), s)).chain(others) {
            shape.fields.entry(name.to_owned()).or_default().shape = of(below);
        }
        for name in list("required") {
            shape.fields.entry(text(name)).or_default().always = true;
        }
        let rules = list("x-kubernetes-validations")
            .iter()
            .map(|r| format!("rule {}", text(&r["rule"])));
        // Each field of an object has its own default.
        let default = schema.get("default").filter(|d| !d.is_object());
        let default = default.map(|d| format!("default {d}"));
        shape.rules = rules.chain(default).collect();

        if let Some(to) = schema["$ref"].as_str() {
            let to = root.pointer(to.trim_start_matches('#'));
            shape = shape.and(of(to.expect("what a $ref names")));
        }
        shape = list("allOf").iter().map(of).fold(shape, Shape::and);
        for key in ["oneOf", "anyOf"] {
            if let Some(either) = list(key).iter().map(of).reduce(Shape::or) {
                shape = shape.and(either);
            }
        }
        shape
    }

    fn and(mut self, other: Shape) -> Shape {
        self.types = match (self.types, other.types) {
            (Some(a), Some(b)) => {
                let is_in = |t: &&String| b.contains(*t) || *t == "integer" && b.contains("number");
                Some(a.iter().filter(is_in).cloned().collect())
            }
            (a, b) => a.or(b),
        };
        self.values = match (self.values.is_empty(), other.values.is_empty()) {
            (false, false) => &self.values & &other.values,
            _ => &self.values | &other.values,
        };
        self.rules.extend(other.rules);
        for (name, field) in other.fields {
            let own = self.fields.remove(&name).unwrap_or_default();
            let always = own.always || field.always;
            let shape = own.shape.and(field.shape);
            self.fields.insert(name, Field { shape, always });
        }
        self
    }

    fn or(mut self, other: Shape) -> Shape {
        self.types = self.types.zip(other.types).map(|(a, b)| &a | &b);
        self.values.extend(other.values);
        self.rules.extend(other.rules);
        for (name, mut field) in other.fields {
            if let Some(own) = self.fields.remove(&name) {
                field.always &= own.always;
                field.shape = own.shape.or(field.shape);
            }
            self.fields.insert(name, field);
        }
        self
    }

    fn tell(&self, at: &str, side: Side, facts: &mut Facts) {
        let named = |t: &&String| t.as_str() != "null";
        let types: Vec<&str> = match &self.types {
            Some(types) => types.iter().filter(named).map(String::as_str).collect(),
            None => vec!["anything"],
        };
        let is_never_null = self.types.as_ref().is_some_and(|t| !t.contains("null"));
        match side {
            Side::Output => facts.insert(format!("{at}: {}", types.join(" or "))),
            Side::Input => types
                .iter()
                .all(|t| facts.insert(format!("{at}: takes {t}"))),
        };
        if side == Side::Output && is_never_null {
            facts.insert(format!("{at}: never null"));
        }
        facts.extend(self.values.iter().map(|v| format!("{at} = {v}")));
        facts.extend(self.rules.iter().map(|r| format!("{at}: {r}")));
        for (name, field) in &self.fields {
            let below = match name.as_str() {
                "[]" => format!("{at}[]"),
                _ => format!("{at}.{name}"),
            };
            match side {
                _ if ["[]", "*"].contains(&name.as_str()) => false,
                Side::Output => field.always && facts.insert(format!("{below}: always there")),
                Side::Input => !field.always && facts.insert(format!("{below}: may be left out")),
            };
            field.shape.tell(&below, side, facts);
        }
    }
}

fn text(value: &Value) -> String {
    value.as_str().expect("a text").to_owned()
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(n) if n.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}
