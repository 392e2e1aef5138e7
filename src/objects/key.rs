//! Recognizes Kubernetes objects by their key and value: kind, namespace and name.
//!
//! Only the key and the type in the value are used; the objects themselves are not decoded. `ops::read` and `cli`
//! call it.
//!
//! Sources: apiserver's `pkg/registry` (paths) and apimachinery's `runtime.Unknown` (envelope).

use super::PROTOBUF;
use crate::base::protobuf::{Value, take_field};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;

/// The key prefixes of API servers: the default, and the two of OpenShift.
const PREFIXES: [&str; 3] = ["/registry/", "/kubernetes.io/", "/openshift.io/"];

/// What the keys of the API servers of a cluster begin with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdPrefixes(Vec<String>);

impl EtcdPrefixes {
    /// The prefix that a user gave, which is the `--etcd-prefix` of an API server; otherwise all that are known.
    pub fn new(given: Option<&str>) -> Self {
        let all = given.map_or(PREFIXES.to_vec(), |given| vec![given]);
        // An API server adds the slash before its prefix.
        let all = all.into_iter().map(|p| match p.trim_matches('/') {
            "" => String::new(),
            p => format!("/{p}"),
        });
        EtcdPrefixes(all.collect())
    }

    /// Returns the prefixes, without slashes at their ends.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// Returns the keys that a namespace may have.
    pub fn namespace_keys(&self, name: &str) -> Vec<Vec<u8>> {
        let key = |prefix: &str| format!("{prefix}/namespaces/{name}").into_bytes();
        self.iter().map(key).collect()
    }

    /// Returns the prefix of a key, if it has one of these.
    pub fn of_key(&self, key: &[u8]) -> Option<&str> {
        let begins = |p: &&str| {
            let rest = key.strip_prefix(p.as_bytes());
            rest.is_some_and(|rest| rest.first() == Some(&b'/'))
        };
        self.iter().find(begins)
    }
}

impl fmt::Display for EtcdPrefixes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(", "))
    }
}

/// An object of an API server. The fields are a contract.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ObjectKey<'a> {
    /// The API version, such as `apps/v1`; null if the value does not tell (deleted, encrypted).
    pub api_version: Option<Cow<'a, str>>,
    /// The kind, such as `Deployment`; null if the value does not tell.
    pub kind: Option<Cow<'a, str>>,
    /// The API group, such as `apps`, empty for the core group; null if neither key nor value tells.
    pub group: Option<Cow<'a, str>>,
    /// The resource, such as `deployments`.
    pub resource: &'a str,
    /// The namespace; null if the object has none.
    pub namespace: Option<&'a str>,
    /// The object's name.
    pub name: &'a str,
}

impl<'a> ObjectKey<'a> {
    /// Recognizes the object of a key; `None` if the key is not one of an API server. `value` is `None` for a
    /// deletion.
    pub fn from_key(key: &'a [u8], value: Option<&'a [u8]>) -> Option<Self> {
        let key = std::str::from_utf8(key).ok()?;
        let (api_version, kind) = value.and_then(type_of).unzip();
        let path = PREFIXES.iter().find_map(|p| key.strip_prefix(p));
        // With another --etcd-prefix, the value shows that it is an object.
        let path = path.or_else(|| {
            let is_object = value.is_some_and(|v| v.starts_with(PROTOBUF)) && kind.is_some();
            Some(key.strip_prefix('/')?.split_once('/')?.1).filter(|_| is_object)
        })?;
        let mut parts: Vec<&str> = path.split('/').collect();
        if parts.iter().any(|p| p.is_empty()) {
            return None;
        }
        // The group of a custom resource is a domain and has a dot. Resources have no dots.
        let group_in_key = parts[0].contains('.').then(|| parts.remove(0));
        if parts.len() > 2 && parts[0] == "services" && ["specs", "endpoints"].contains(&parts[1]) {
            let endpoints = parts.remove(1) == "endpoints";
            if endpoints {
                parts[0] = "endpoints";
            }
        }
        let (&resource, rest) = parts.split_first()?;
        let (namespace, name) = match *rest {
            [name] => (None, name),
            [namespace, name] => (Some(namespace), name),
            _ => return None,
        };
        let group = match (group_in_key, &api_version) {
            (Some(group), _) => Some(Cow::Borrowed(group)),
            (None, Some(v)) => Some(match v {
                Cow::Borrowed(v) => Cow::Borrowed(v.split_once('/').map_or("", |(g, _)| g)),
                Cow::Owned(v) => Cow::Owned(v.split_once('/').map_or("", |(g, _)| g).to_owned()),
            }),
            (None, None) => None,
        };
        Some(ObjectKey {
            api_version,
            kind,
            group,
            resource: if resource == "minions" {
                "nodes"
            } else {
                resource
            },
            namespace,
            name,
        })
    }
}

/// Returns the API version and the kind of an object.
fn type_of(value: &[u8]) -> Option<(Cow<'_, str>, Cow<'_, str>)> {
    #[derive(Deserialize)]
    struct TypeMeta<'a> {
        #[serde(borrow, rename = "apiVersion")]
        api_version: Cow<'a, str>,
        #[serde(borrow)]
        kind: Cow<'a, str>,
    }
    let Some(unknown) = value.strip_prefix(PROTOBUF) else {
        if value.first() != Some(&b'{') {
            return None;
        }
        let meta: TypeMeta<'_> = serde_json::from_slice(value).ok()?;
        return Some((meta.api_version, meta.kind));
    };
    // runtime.Unknown: the TypeMeta is field 1; in it apiVersion is field 1 and kind 2.
    let meta = field(unknown, 1)?;
    let text = |number| std::str::from_utf8(field(meta, number)?).ok();
    Some((text(1)?.into(), text(2)?.into()))
}

/// Returns the first field of this number that holds bytes.
fn field(mut message: &[u8], number: u64) -> Option<&[u8]> {
    while !message.is_empty() {
        match take_field(&mut message)? {
            (0, _) => return None,
            (n, Value::Bytes(b)) if n == number => return Some(b),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn describe(key: &str, value: &[u8]) -> Option<String> {
        let o = ObjectKey::from_key(key.as_bytes(), Some(value))?;
        Some(format!(
            "{} {} {:?} {} {} {}",
            o.api_version.as_deref().unwrap_or("-"),
            o.kind.as_deref().unwrap_or("-"),
            o.group,
            o.resource,
            o.namespace.unwrap_or("-"),
            o.name
        ))
    }

    #[test]
    fn objects_are_recognized_by_path_and_envelope() {
        let pod = b"k8s\0\x0a\x09\x0a\x02v1\x12\x03Pod\x12\x02ab";
        let widget = br#"{"spec":{"kind":"no"},"kind":"Widget","apiVersion":"example.com/v1"}"#;
        for (key, value, expected) in [
            (
                "/registry/pods/default/web-0",
                &pod[..],
                r#"v1 Pod Some("") pods default web-0"#,
            ),
            ("/registry/minions/n1", pod, r#"v1 Pod Some("") nodes - n1"#),
            (
                "/registry/services/specs/default/db",
                pod,
                r#"v1 Pod Some("") services default db"#,
            ),
            (
                "/registry/services/endpoints/default/db",
                pod,
                r#"v1 Pod Some("") endpoints default db"#,
            ),
            (
                "/my-cluster/pods/default/web-0",
                pod,
                r#"v1 Pod Some("") pods default web-0"#,
            ),
            (
                "/registry/example.com/widgets/a/b",
                widget,
                r#"example.com/v1 Widget Some("example.com") widgets a b"#,
            ),
            (
                "/registry/example.com/widgets/a/b",
                b"",
                r#"- - Some("example.com") widgets a b"#,
            ),
            (
                "/registry/clusterroles/system:node",
                b"k8s:enc:aescbc:v1:x",
                "- - None clusterroles - system:node",
            ),
            (
                "/kubernetes.io/namespaces/x",
                b"{}",
                "- - None namespaces - x",
            ),
            (
                "/registry/deployments/a/b",
                br#"{"kind":"D\u0065p","apiVersion":"apps\/v1"}"#,
                r#"apps/v1 Dep Some("apps") deployments a b"#,
            ),
        ] {
            assert_eq!(describe(key, value).as_deref(), Some(expected), "{key}");
        }
        for (key, value) in [
            ("/registry/health", &pod[..]),
            ("/registry/pods/a/b/c", pod),
            ("/registry/pods//b", pod),
            ("/registry/example.com/widgets", pod),
            ("/other/pods/a/b", b"{}"),
            ("pods", pod),
            ("", pod),
        ] {
            assert_eq!(describe(key, value), None, "{key}");
        }
        // A value that is cut anywhere gives an object without a kind, and no panic.
        for cut in 0..15 {
            let o = describe("/registry/pods/a/b", &pod[..cut]).unwrap();
            assert!(o.starts_with("- -"), "{cut}: {o}");
        }
    }
}
