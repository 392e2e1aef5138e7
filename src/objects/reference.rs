//! Objects by name: `KIND/NAMESPACE/NAME`, and what a command line selects.

use super::key::EtcdPrefixes;
use super::resource::{Resource, called};
use crate::base::opt::ETCD_PREFIX;
use crate::base::printable::line;
use crate::error::{Error, Reason};
use crate::mvcc::KeyRange;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

/// What kubectl calls `all`.
const ALL: [&str; 10] = [
    "pods",
    "replicationcontrollers",
    "services",
    "daemonsets.apps",
    "deployments.apps",
    "replicasets.apps",
    "statefulsets.apps",
    "horizontalpodautoscalers.autoscaling",
    "cronjobs.batch",
    "jobs.batch",
];

/// What a user calls an object, or all objects of a kind: `KIND[.GROUP][/NAMESPACE][/NAME]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    /// The kind, in any case, its plural or a short name; with or without its group.
    pub kind: String,
    /// The namespace, if one is named.
    pub namespace: Option<String>,
    /// The name; `None` for all objects of the kind.
    pub name: Option<String>,
}

impl Reference {
    /// Parses a reference; `None` if the text is none, such as a key that begins with a slash. `namespace` is that of
    /// a flag.
    pub fn parse(text: &str, namespace: Option<&str>) -> Option<Self> {
        let parts: Vec<&str> = text.split('/').collect();
        let (kind, own_namespace, name) = match *parts {
            [kind] => (kind, None, None),
            [kind, name] => (kind, None, Some(name)),
            [kind, namespace, name] => (kind, Some(namespace), Some(name)),
            _ => return None,
        };
        let namespace = own_namespace.or(namespace);
        if parts.iter().any(|part| part.is_empty()) {
            return None;
        }
        Some(Reference {
            kind: kind.to_owned(),
            namespace: namespace.map(str::to_owned),
            name: name.map(str::to_owned),
        })
    }

    /// Parses what a command line names: KIND, KIND/NAME, KIND/NAMESPACE/NAME, several of these, or kinds separated by
    /// commas, which names may follow. `all` means the common kinds of workloads. `None` if the words name no objects.
    fn parse_all(words: &[&str], namespace: Option<&str>) -> Option<Vec<Self>> {
        let (first, names) = words.split_first()?;
        if first.contains('/') {
            return words
                .iter()
                .map(|word| Self::parse(word, namespace))
                .collect();
        }
        let mut all = Vec::new();
        for kind in first.split(',') {
            if kind == "all" && names.is_empty() {
                all.extend(ALL.iter().filter_map(|kind| Self::parse(kind, namespace)));
                continue;
            }
            let kind = Self::parse(kind, namespace)?;
            for name in names {
                if name.is_empty() || name.contains('/') {
                    return None;
                }
                all.push(Reference {
                    name: Some((*name).to_owned()),
                    ..kind.clone()
                });
            }
            if names.is_empty() {
                all.push(kind);
            }
        }
        Some(all)
    }

    /// Returns the kind among `resources`; `None` if it is unknown. A kind of Kubernetes' own comes before those of
    /// custom resources, which have their groups in their names.
    ///
    /// # Errors
    /// Fails with `Usage` if several have the name.
    pub fn resource<'r>(&self, resources: &'r [Resource]) -> Result<Option<&'r Resource>, Error> {
        let all: Vec<&Resource> = called(resources, &self.kind).collect();
        if let Some(built_in) = all.iter().find(|r| !r.is_custom) {
            return Ok(Some(built_in));
        }
        match *all {
            [] => Ok(None),
            [only] => Ok(Some(only)),
            _ => {
                let names: Vec<String> = all.iter().map(|r| r.full_name()).collect();
                Err(Reason::Usage.error(format!(
                    "\"{}\" means several kinds: give one of {}",
                    self.kind,
                    names.join(", ")
                )))
            }
        }
    }

    /// Returns the keys that the object may have.
    ///
    /// # Errors
    /// Fails with `Usage` if the kind has a namespace and none is named, or the other way round.
    fn keys(&self, resource: &Resource, prefixes: &EtcdPrefixes) -> Result<Vec<Vec<u8>>, Error> {
        let name = self.name.as_deref().unwrap_or_default();
        if resource.is_namespaced && self.namespace.is_none() {
            let (plural, kind) = (&resource.plural, &self.kind);
            return Err(Reason::Usage.error(format!(
                "{plural} have a namespace: give {kind}/NAMESPACE/{name}, or -n NAMESPACE"
            )));
        }
        let namespace = self.namespace_of(resource)?;
        let key = |prefix| (resource.prefix(prefix, namespace) + name).into_bytes();
        Ok(prefixes.iter().map(key).collect())
    }

    /// Returns what the keys of all objects of the kind begin with, or of those in the namespace. `all` means all
    /// namespaces.
    ///
    /// # Errors
    /// Fails with `Usage` if the kind has a namespace and none is named, or the other way round.
    fn prefixes(
        &self,
        resource: &Resource,
        prefixes: &EtcdPrefixes,
        all: bool,
    ) -> Result<Vec<Vec<u8>>, Error> {
        if resource.is_namespaced && self.namespace.is_none() && !all {
            return Err(Reason::Usage.error(format!(
                "{} have a namespace: give -n NAMESPACE, or -A for those of all namespaces",
                resource.plural
            )));
        }
        Ok(resource.prefixes(prefixes, self.namespace_of(resource)?))
    }

    fn namespace_of(&self, resource: &Resource) -> Result<Option<&str>, Error> {
        if !resource.is_namespaced && self.namespace.is_some() {
            return Err(Reason::Usage.error(format!(
                "{} have no namespace: leave it out",
                resource.plural
            )));
        }
        Ok(self.namespace.as_deref())
    }
}

/// What a command line names.
#[derive(Debug, Clone, Copy)]
pub struct Names<'a> {
    /// Words as [`Reference`] describes them; those that begin with a slash are keys, and so is one that names nothing.
    pub words: &'a [OsString],
    /// The namespace of a flag. Without words, all objects in it are meant.
    pub namespace: Option<&'a str>,
    /// Whether a kind means its objects in all namespaces if none is named.
    pub all_namespaces: bool,
    /// What the keys of the API servers begin with.
    pub prefixes: &'a EtcdPrefixes,
}

/// Of when the kinds are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KindsOf {
    /// Of the state that is read.
    State,
    /// Of all that the backup holds.
    AllTimes,
}

/// What names select.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selection {
    /// All objects of these kinds, and their keys; without words, all keys, and no kinds.
    Kinds(Vec<Resource>, KeyRange),
    /// Objects with names: the keys that each may have, since there are several prefixes of API servers.
    Objects(Vec<Vec<Vec<u8>>>),
}

impl Selection {
    /// Returns all keys.
    pub fn range(&self) -> KeyRange {
        match self {
            Selection::Kinds(_, range) => range.clone(),
            Selection::Objects(all) => KeyRange::Keys(all.iter().flatten().cloned().collect()),
        }
    }

    /// Returns the keys of each part that was asked for.
    pub fn parts(&self) -> Vec<KeyRange> {
        let keys = |keys: &Vec<Vec<u8>>| KeyRange::Keys(keys.iter().cloned().collect());
        match self {
            Selection::Kinds(_, range) => vec![range.clone()],
            Selection::Objects(all) => all.iter().map(keys).collect(),
        }
    }
}

impl Names<'_> {
    /// Returns what is selected. `custom` returns the kinds of a backup; it is called as long as one is unknown.
    ///
    /// # Errors
    /// `Usage` if the words name no objects, or mix names and whole kinds; as [`Reference`]. `KeyNotFound` if a kind is
    /// unknown; those of `custom`.
    pub fn select(
        &self,
        custom: impl Fn(KindsOf) -> Result<Vec<Resource>, Error>,
    ) -> Result<Selection, Error> {
        if self.words.is_empty() {
            return Ok(Selection::Kinds(Vec::new(), self.all_keys()));
        }
        let mut resources: Vec<Resource> = Resource::built_in().collect();
        let (keys, words): (Vec<_>, Vec<_>) = self
            .words
            .iter()
            .partition(|word| word.as_bytes().starts_with(b"/"));
        let mut objects: Vec<Vec<Vec<u8>>> = Vec::new();
        objects.extend(keys.iter().map(|key| vec![key.as_bytes().to_vec()]));
        let references = match (self.references(&words), &words[..]) {
            // One word that is no name is a key, too.
            (Err(_), [key]) if keys.is_empty() => {
                objects.push(vec![key.as_bytes().to_vec()]);
                Vec::new()
            }
            (references, _) => references?,
        };
        for of in [KindsOf::State, KindsOf::AllTimes] {
            let mut are_known = true;
            for reference in &references {
                are_known &= reference.resource(&resources)?.is_some();
            }
            if are_known {
                break;
            }
            let mut more = custom(of)?;
            more.retain(|new| !resources.iter().any(|r| r.full_name() == new.full_name()));
            resources.extend(more);
        }
        let (mut kinds, mut below) = (Vec::new(), Vec::new());
        for reference in &references {
            let Some(resource) = reference.resource(&resources)? else {
                return Err(Reason::KeyNotFound.error(format!(
                    "\"{}\" is neither a kind of Kubernetes' own nor of a CustomResourceDefinition below {}: check the name, or {ETCD_PREFIX}",
                    line(&reference.kind),
                    self.prefixes
                )));
            };
            if reference.name.is_some() {
                objects.push(reference.keys(resource, self.prefixes)?);
            } else {
                below.extend(reference.prefixes(resource, self.prefixes, self.all_namespaces)?);
                kinds.push(resource.clone());
            }
        }
        if kinds.is_empty() {
            return Ok(Selection::Objects(objects));
        }
        if objects.is_empty() {
            return Ok(Selection::Kinds(kinds, KeyRange::prefixes(below)));
        }
        Err(Reason::Usage.error("give either names, or kinds whose objects are all meant"))
    }

    /// All keys of the namespace, or of the API servers: also of kinds that nobody defines, OpenShift's, those of aggregated
    /// API servers, and orphans.
    fn all_keys(&self) -> KeyRange {
        let roots = self.prefixes.iter().map(|p| p.as_bytes().to_vec());
        match self.namespace {
            Some(namespace) => KeyRange::Namespace {
                roots: roots.collect(),
                name: namespace.as_bytes().to_vec(),
                itself: false,
            },
            None => KeyRange::prefixes(roots.map(|root| [&root[..], b"/"].concat())),
        }
    }

    fn references(&self, words: &[&OsString]) -> Result<Vec<Reference>, Error> {
        if words.is_empty() {
            return Ok(Vec::new());
        }
        let text: Option<Vec<&str>> = words.iter().map(|word| word.to_str()).collect();
        let all = text.and_then(|words| Reference::parse_all(&words, self.namespace));
        all.ok_or_else(|| {
            Reason::Usage.error(
                "give KIND NAME..., KIND/NAMESPACE/NAME of each object, or KINDS; a key begins with a slash",
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn key(text: &str, namespace: Option<&str>) -> String {
        let reference = Reference::parse(text, namespace).unwrap();
        let mut resources: Vec<Resource> = Resource::built_in().collect();
        for (group, kind, plural) in [
            ("a.example.com", "Widget", "widgets"),
            ("b.example.com", "Widget", "widgets"),
            ("serving.example.com", "Service", "services"),
        ] {
            let definition = json!({
                "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
                "spec": {
                    "group": group, "scope": "Namespaced",
                    "names": {"kind": kind, "plural": plural, "shortNames": [if kind == "Widget" { "WD" } else { "SRV" }]},
                },
            });
            let definition = serde_json::to_vec(&definition).unwrap();
            let definition = super::super::Object::decode(&definition).unwrap();
            resources.push(Resource::of_definition(&definition).unwrap());
        }
        let resource = match reference.resource(&resources) {
            Ok(Some(resource)) => resource,
            Ok(None) => return "unknown".to_owned(),
            Err(e) => return e.to_string(),
        };
        match reference.keys(resource, &EtcdPrefixes::new(None)) {
            Ok(keys) => String::from_utf8(keys[0].clone()).unwrap(),
            Err(e) => e.to_string(),
        }
    }

    #[test]
    fn objects_are_found_by_every_name_of_their_kind() {
        for (text, expected) in [
            ("Deployment/shop/web", "/registry/deployments/shop/web"),
            ("deploy/shop/web", "/registry/deployments/shop/web"),
            (
                "DEPLOYMENTS.apps/shop/web",
                "/registry/deployments/shop/web",
            ),
            ("svc/a/b", "/registry/services/specs/a/b"),
            ("ep/a/b", "/registry/services/endpoints/a/b"),
            ("node/n", "/registry/minions/n"),
            ("minions/n", "/registry/minions/n"),
            ("ing/a/b", "/registry/ingress/a/b"),
            ("rc/a/b", "/registry/controllers/a/b"),
            ("netpol/a/b", "/registry/networkpolicies/a/b"),
            (
                "crd/x.y",
                "/registry/apiextensions.k8s.io/customresourcedefinitions/x.y",
            ),
            (
                "widget.a.example.com/n/w",
                "/registry/a.example.com/widgets/n/w",
            ),
            (
                "wd.b.example.com/n/w",
                "/registry/b.example.com/widgets/n/w",
            ),
            (
                "wd/n/w",
                "\"wd\" means several kinds: give one of widgets.a.example.com, widgets.b.example.com",
            ),
            ("services/n/s", "/registry/services/specs/n/s"),
            (
                "service.serving.example.com/n/s",
                "/registry/serving.example.com/services/n/s",
            ),
            ("gadget/n/w", "unknown"),
            (
                "pod/web",
                "pods have a namespace: give pod/NAMESPACE/web, or -n NAMESPACE",
            ),
            ("node/a/n", "nodes have no namespace: leave it out"),
        ] {
            assert_eq!(key(text, None), expected, "{text}");
        }
        assert_eq!(key("po/web", Some("shop")), "/registry/pods/shop/web");
        for text in ["/registry/pods/a/b", "a/b/c/d", "pods//b", ""] {
            assert_eq!(Reference::parse(text, None), None, "{text}");
        }
    }
}
