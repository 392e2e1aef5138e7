//! Objects as they are stored, against what Go and the formats say.

use super::*;
use crate::base::protobuf::{Value as Wire, message};
use serde::Deserialize;
use serde_json::json;
use std::collections::BTreeMap;

/// An object as it is stored, and its JSON, both made by Go: see `table/generate.go`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Vector {
    stored: String,
    #[serde(rename = "JSON")]
    json: Value,
}

fn vectors() -> BTreeMap<String, Vec<Vector>> {
    let packed: &[u8] = include_bytes!("table/vectors.json.zst");
    serde_json::from_slice(&zstd::decode_all(packed).unwrap()).unwrap()
}

fn stored(vector: &Vector) -> Vec<u8> {
    base64_simd::STANDARD.decode_to_vec(&vector.stored).unwrap()
}

/// Returns the paths of the fields that differ.
fn differences(a: &Value, b: &Value) -> Vec<String> {
    let mut all = Vec::new();
    let mut differ = |field: String, a: &Value, b: &Value| {
        let below = differences(a, b).into_iter();
        all.extend(below.map(|path| format!(".{field}{path}")));
    };
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            let missing = json!("<missing>");
            for key in a.keys().chain(b.keys().filter(|key| !a.contains_key(*key))) {
                let field = |object: &Map<String, Value>| object.get(key).cloned();
                let (a, b) = (field(a), field(b));
                differ(
                    key.clone(),
                    a.as_ref().unwrap_or(&missing),
                    b.as_ref().unwrap_or(&missing),
                );
            }
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            for (nth, (a, b)) in a.iter().zip(b).enumerate() {
                differ(nth.to_string(), a, b);
            }
        }
        _ if a == b => {}
        _ => all.push(format!(": {a}, and by Go {b}")),
    }
    all
}

#[test]
fn every_kind_is_decoded_as_go_decodes_it() {
    let vectors = vectors();
    assert!(vectors.len() >= 180, "{}", vectors.len());
    for (kind, vectors) in &vectors {
        for (variant, vector) in vectors.iter().enumerate() {
            let object = Object::decode(&stored(vector)).unwrap();
            assert_eq!(object.unknown_fields, 0, "{kind} {variant}");
            let differences = differences(&Value::Object(object.json), &vector.json);
            // Kinds that are gone are encoded by an older Go type, which wrote these differently if empty.
            let is_known = |d: &String| {
                let empty = [
                    ".creationTimestamp: \"<missing>\", and by Go null",
                    ".hostAliases.1.ip",
                ];
                empty.iter().any(|known| d.contains(known))
            };
            let others: Vec<_> = differences.into_iter().filter(|d| !is_known(d)).collect();
            assert_eq!(others, [""; 0], "{kind} {variant}");
        }
    }
}

#[test]
fn a_cut_or_changed_value_is_refused_or_read_without_a_panic() {
    let mut rng = fastrand::Rng::with_seed(crate::seed());
    for vector in vectors().values().flatten() {
        let stored = stored(vector);
        for _ in 0..20 {
            let _ = Object::decode(&stored[..rng.usize(..stored.len())]);
            let mut changed = stored.clone();
            changed[rng.usize(..stored.len())] ^= 1 << rng.u8(..8);
            let _ = Object::decode(&changed);
        }
    }
}

fn in_protobuf(api_version: &str, kind: &str, raw: &[u8]) -> Vec<u8> {
    let meta = message([
        (1, Wire::Bytes(api_version.as_bytes())),
        (2, Wire::Bytes(kind.as_bytes())),
    ]);
    let envelope = message([(1, Wire::Bytes(&meta)), (2, Wire::Bytes(raw))]);
    [PROTOBUF, &envelope].concat()
}

#[test]
fn what_is_not_decoded_says_why() {
    let reason = |value: &[u8]| Object::decode(value).unwrap_err().to_string();
    let none = "not decoded: not an object of Kubernetes";
    for value in [
        &b""[..],
        b"text",
        b"{",
        b"{}",
        b"[1]",
        br#"{"kind":"a"}"#,
        b"\xd9\xd9\xf7\x01",
    ] {
        assert_eq!(reason(value), none);
    }
    assert_eq!(
        reason(b"k8s:enc:aescbc:v1:key\x1b1:\x01:\xff"),
        "encrypted at rest with aescbc:v1:key\\u{1b}1: give its key with encryption-config"
    );
    assert_eq!(
        reason(&in_protobuf(
            "apps.openshift.io/v1",
            "DeploymentConfig",
            b""
        )),
        "not decoded: DeploymentConfig of apps.openshift.io/v1 is not one of Kubernetes' own kinds"
    );
    assert_eq!(
        reason(&in_protobuf("v1", "Pod", b"\x0a")),
        "not decoded: the protobuf is damaged"
    );
}

#[test]
fn hostile_values_are_bounded() {
    let too_large = Err(NotDecoded::TooLarge);
    // Containers without a field, two bytes each, whose JSON has a dozen.
    let spec: Vec<u8> = (0..1 << 20).flat_map(|_| [0x12, 0]).collect();
    let pod = message([(2, Wire::Bytes(&spec))]);
    assert_eq!(Object::decode(&in_protobuf("v1", "Pod", &pod)), too_large);
    // Each map of JSON takes hundreds of bytes.
    let json = format!("[{}1]", r#"{"":0},"#.repeat(MAX_NODES + 1));
    let json = format!(r#"{{"apiVersion":"v1","kind":"a","a":{json}}}"#);
    assert_eq!(Object::decode(json.as_bytes()), too_large);
    assert_eq!(Object::decode(&vec![b'{'; MAX_BYTES + 1]), too_large);
    // Lists within lists.
    let deep = [CBOR, &[0x81; 1000]].concat();
    assert_eq!(Object::decode(&deep), too_large);
    let long = [
        CBOR,
        &[0x9b, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
    ]
    .concat();
    assert!(matches!(Object::decode(&long), Err(NotDecoded::Damaged(_))));
}

#[test]
fn fields_that_are_not_in_the_table_are_counted() {
    let raw = message([(1000, Wire::Varint(1)), (1001, Wire::Bytes(b"a"))]);
    let object = Object::decode(&in_protobuf("v1", "ConfigMap", &raw)).unwrap();
    assert_eq!(object.unknown_fields, 2);
    let metadata = json!({});
    let expected = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata});
    assert_eq!(Value::Object(object.json), expected);
}

#[test]
fn custom_resources_are_json_or_cbor() {
    let expected = json!({
        "apiVersion": "example.com/v1", "kind": "Widget",
        "spec": {"bytes": "AP8=", "list": [1, -1, 1.5, true, null], "text": "é"},
    });
    let json = serde_json::to_vec(&expected).unwrap();
    assert_eq!(Value::Object(Object::decode(&json).unwrap().json), expected);
    // As API servers encode it: strings are byte strings. By hand after RFC 8949.
    let mut cbor = CBOR.to_vec();
    let text = |cbor: &mut Vec<u8>, text: &str| {
        cbor.push(0x40 | text.len() as u8);
        cbor.extend_from_slice(text.as_bytes());
    };
    cbor.push(0xa3);
    text(&mut cbor, "apiVersion");
    text(&mut cbor, "example.com/v1");
    text(&mut cbor, "kind");
    text(&mut cbor, "Widget");
    text(&mut cbor, "spec");
    // A map and a string of indefinite length.
    cbor.push(0xbf);
    text(&mut cbor, "text");
    cbor.extend_from_slice(&[0x5f, 0x41, 0xc3, 0x41, 0xa9, 0xff]);
    text(&mut cbor, "bytes");
    cbor.extend_from_slice(&[0xd6, 0x42, 0x00, 0xff]);
    text(&mut cbor, "list");
    cbor.extend_from_slice(&[0x85, 0x01, 0x20, 0xf9, 0x3e, 0x00, 0xf5, 0xf6, 0xff]);
    assert_eq!(Value::Object(Object::decode(&cbor).unwrap().json), expected);
    for cut in 3..cbor.len() {
        assert!(Object::decode(&cbor[..cut]).is_err(), "{cut}");
    }
}

fn object(json: Value) -> Object {
    Object::decode(&serde_json::to_vec(&json).unwrap()).unwrap()
}

#[test]
fn values_of_secrets_are_hidden() {
    let mut secret = object(json!({
        "apiVersion": "v1", "kind": "Secret",
        "data": {"a": "", "b": "YWI=", "c": "YWJj"},
        "metadata": {"annotations": {LAST_APPLIED: "YWJj", "other": "x"}, "name": "s"},
    }));
    secret.hide_secrets();
    let expected = json!({
        "apiVersion": "v1", "kind": "Secret",
        "data": {"a": "<hidden, 0 bytes>", "b": "<hidden, 2 bytes>", "c": "<hidden, 3 bytes>"},
        "metadata": {"annotations": {LAST_APPLIED: "<hidden>", "other": "<hidden>"}, "name": "s"},
    });
    assert_eq!(Value::Object(secret.json), expected);
}

#[test]
fn the_guide_has_the_rules() {
    let guide = include_str!("../../docs/guides/deleted-object.md");
    let flowing = guide.replace('\n', " ");
    let mut lines = Vec::new();
    for (kind, why) in rules::NEVER {
        lines.push(format!("| {kind} | {why} |"));
    }
    for rule in rules::RULES.iter().filter(|rule| !rule.why.is_empty()) {
        let kind = if rule.kind.is_empty() {
            "all"
        } else {
            rule.kind
        };
        lines.push(format!(
            "| {kind} | `{}` | {} |",
            rule.path.join("."),
            rule.why
        ));
    }
    let owned = rules::MADE_BY_OWNER
        .iter()
        .map(|kind| kind.split('.').next().unwrap());
    lines.push(owned.collect::<Vec<_>>().join(", "));
    for line in lines {
        assert!(
            flowing.contains(&line),
            "docs/guides/deleted-object.md lacks: {line}"
        );
    }
}

#[test]
fn addresses_of_services_are_forgotten() {
    let mut service = object(json!({
        "apiVersion": "v1", "kind": "Service", "spec": {
            "clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1"], "healthCheckNodePort": 30001,
            "ports": [{"port": 80, "nodePort": 30000}],
        },
    }));
    assert!(service.forget_addresses());
    assert_eq!(service.json["spec"], json!({"ports": [{"port": 80}]}));
    assert!(!service.forget_addresses());
    let spec = json!({"clusterIP": "None", "clusterIPs": ["None"]});
    let mut headless = object(json!({"apiVersion": "v1", "kind": "Service", "spec": spec}));
    assert!(!headless.forget_addresses());
    assert_eq!(headless.json["spec"], spec);
    // Knative's.
    let mut other = object(
        json!({"apiVersion": "serving.knative.dev/v1", "kind": "Service", "spec": {"clusterIP": "a"}}),
    );
    assert!(!other.forget_addresses());
}

#[test]
fn a_definition_of_v1beta1_becomes_one_of_v1() {
    let schema =
        json!({"openAPIV3Schema": {"type": "object", "properties": {"a": {"type": "string"}}}});
    let definition = object(json!({
        "apiVersion": "apiextensions.k8s.io/v1beta1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "w.example.com"},
        "spec": {
            "group": "example.com", "version": "v1", "validation": schema, "preserveUnknownFields": true,
            "additionalPrinterColumns": [{"JSONPath": ".spec.a", "name": "A"}],
            "subresources": {"status": {}},
            "conversion": {"strategy": "Webhook", "webhookClientConfig": {"url": "u"}, "conversionReviewVersions": ["v1"]},
            "versions": [{"name": "v1", "served": true, "storage": true}, {"name": "v0", "schema": {"own": true}}],
        },
    }));
    let definition = definition.cleaned().unwrap();
    let columns = json!([{"jsonPath": ".spec.a", "name": "A"}]);
    let whole = json!({"openAPIV3Schema": {
        "type": "object", "properties": {"a": {"type": "string"}}, "x-kubernetes-preserve-unknown-fields": true,
    }});
    let subresources = json!({"status": {}});
    let expected = json!({
        "group": "example.com",
        "conversion": {"strategy": "Webhook", "webhook": {"clientConfig": {"url": "u"}, "conversionReviewVersions": ["v1"]}},
        "versions": [
            {"name": "v1", "served": true, "storage": true, "schema": whole, "subresources": subresources, "additionalPrinterColumns": columns},
            {"name": "v0", "schema": {"own": true}, "subresources": subresources, "additionalPrinterColumns": columns},
        ],
    });
    assert_eq!(definition.json["spec"], expected);
    assert_eq!(definition.api_version(), "apiextensions.k8s.io/v1");

    let bare = object(json!({
        "apiVersion": "apiextensions.k8s.io/v1beta1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "w.example.com"}, "spec": {"version": "v1"},
    }));
    let bare = bare.cleaned().unwrap();
    let any = json!({"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}});
    let only = json!([{"name": "v1", "served": true, "storage": true, "schema": any}]);
    assert_eq!(bare.json["spec"], json!({"versions": only}));
}

#[test]
fn a_clean_object_has_nothing_that_a_server_sets() {
    let meta = json!({
        "annotations": {LAST_APPLIED: "{}"}, "creationTimestamp": null, "generation": 1, "name": "a",
        "labels": {"controller-uid": "u", "app": "x"}, "managedFields": [], "namespace": "n",
        "ownerReferences": [{"uid": "o"}], "resourceVersion": "7", "uid": "u",
    });
    let job = object(json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "status": {"active": 1},
        "spec": {
            "selector": {"matchLabels": {"controller-uid": "u"}},
            "template": {"metadata": {"labels": {"controller-uid": "u"}}},
        },
    }));
    for (kind, spec, annotation) in [
        (
            "PersistentVolume",
            "claimRef",
            "pv.kubernetes.io/bound-by-controller",
        ),
        (
            "PersistentVolumeClaim",
            "volumeName",
            "pv.kubernetes.io/bind-completed",
        ),
        ("Secret", "none", "kubernetes.io/service-account.uid"),
    ] {
        let claim = json!({"kind": "PersistentVolumeClaim", "name": "c", "uid": "u", "resourceVersion": "7"});
        let bound = object(json!({
            "apiVersion": "v1", "kind": kind, "spec": {spec: claim},
            "metadata": {"name": "a", "annotations": {annotation: "yes", "own": "x"}},
        }));
        let bound = bound.cleaned().unwrap();
        assert_eq!(bound.json["metadata"]["annotations"], json!({"own": "x"}));
        let is_volume = kind == "PersistentVolume";
        assert_eq!(bound.json["spec"][spec]["uid"].is_null(), is_volume);
        assert_eq!(bound.json["spec"][spec]["name"], "c");
    }
    let list = object(json!({"apiVersion": "v1", "kind": "Pod", "items": []}));
    assert_eq!(list.cleaned(), Err(NotDecoded::Items));
    let job = job.cleaned().unwrap();
    let expected = json!({
        "apiVersion": "batch/v1", "kind": "Job",
        "metadata": {"labels": {"app": "x"}, "name": "a", "namespace": "n"},
        "spec": {"template": {"metadata": {}}},
    });
    assert_eq!(Value::Object(job.json), expected);
}
