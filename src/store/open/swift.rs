//! Opens OpenStack Swift: what its settings, its variables and a Secret say of who logs in where.

use super::secret::{Renewed, Secret};
use super::{Family, Means, Place, no_such_setting};
use crate::error::{Reason, Result};
use crate::store::Store;
use crate::store::exclude::ExcludeTags;
use crate::store::swift::{LARGEST_OBJECT, Login, Swift};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::runtime::Handle;

/// The settings: their keys, the variables that have them (the first that is set), and their names in
/// a Secret.
const SETTINGS: [(&str, &[&str], &str); 15] = [
    ("auth_url", &["OS_AUTH_URL", "ST_AUTH"], "authURL"),
    ("username", &["OS_USERNAME", "ST_USER"], "username"),
    ("password", &["OS_PASSWORD", "ST_KEY"], "password"),
    (
        "domain_name",
        &["OS_DOMAIN_NAME", "OS_USER_DOMAIN_NAME"],
        "domainName",
    ),
    ("domain_id", &["OS_USER_DOMAIN_ID"], "domainID"),
    (
        "project_domain_name",
        &["OS_PROJECT_DOMAIN_NAME"],
        "projectDomainName",
    ),
    (
        "tenant_name",
        &["OS_PROJECT_NAME", "OS_TENANT_NAME"],
        "tenantName",
    ),
    ("tenant_id", &["OS_PROJECT_ID", "OS_TENANT_ID"], "tenantID"),
    ("region", &["OS_REGION_NAME"], "region"),
    (
        "interface",
        &["OS_INTERFACE", "OS_ENDPOINT_TYPE"],
        "interface",
    ),
    (
        "application_credential_id",
        &["OS_APPLICATION_CREDENTIAL_ID"],
        "applicationCredentialID",
    ),
    (
        "application_credential_name",
        &["OS_APPLICATION_CREDENTIAL_NAME"],
        "applicationCredentialName",
    ),
    (
        "application_credential_secret",
        &["OS_APPLICATION_CREDENTIAL_SECRET"],
        "applicationCredentialSecret",
    ),
    ("storage_url", &["OS_STORAGE_URL"], "storageURL"),
    ("auth_token", &["OS_AUTH_TOKEN"], "authToken"),
];

/// Those that say who logs in.
const IDENTITY: [&str; 6] = [
    "username",
    "password",
    "application_credential_id",
    "application_credential_name",
    "application_credential_secret",
    "auth_token",
];

pub(super) fn open(place: &Place, means: Means, handle: Handle) -> Result<Store> {
    let (mut client, options) = means.plain_client()?;
    if let Some((key, _)) = options
        .iter()
        .find(|(key, _)| SETTINGS.iter().all(|(known, ..)| known != key))
    {
        return Err(no_such_setting(key));
    }
    let secret = means.read_secret()?;
    let make = {
        let url = place.url.clone();
        move |secret: Option<&Secret>| {
            let settings = settings(|name| std::env::var(name).ok(), secret, &options);
            login(&settings).map_err(|what| {
                let is_given = |name: &str| is_given(&options, name);
                if let Some(secret) = secret
                    && !secret.has_credentials(Family::Swift, is_given)
                {
                    return secret.lacks_credentials(Family::Swift);
                }
                let advice = "see docs/stores.md for Swift's settings";
                Reason::Configuration.error(format!("--store {url}: {what}; {advice}"))
            })
        }
    };
    let first = make(secret.as_ref())?;
    if first.urls().any(|url| url.starts_with("http://")) {
        client = client.with_allow_http(true);
    }
    let http = means.http(&client, &place.what)?;
    let requests = means.requests.most();
    let login: Box<dyn Fn() -> Login + Send + Sync> = match (means.secret, secret) {
        (Some(source), Some(secret)) => {
            let renewed = Renewed::new(source, secret, move |secret| make(Some(secret)))?;
            Box::new(move || renewed.current())
        }
        _ => Box::new(move || first.clone()),
    };
    let swift = Swift::new(http, place.bucket.clone(), means.retry, login);
    Ok(place
        .store(Arc::new(swift), ExcludeTags::none(), handle)
        .with_requests(requests)
        .with_largest_copy(LARGEST_OBJECT))
}

/// Whether an option gives the setting that has this name, or this variable.
fn is_given(options: &[(String, String)], name: &str) -> bool {
    let is_it = |variables: &[&str], own: &str| own == name || variables.contains(&name);
    let known = SETTINGS
        .iter()
        .find(|(_, variables, own)| is_it(variables, own));
    known.is_some_and(|(key, ..)| options.iter().any(|(given, _)| given == key))
}

/// Each setting by its key: what is given wins over the Secret, that over the environment. With a Secret, nobody logs
/// in as the environment says.
fn settings(
    variable: impl Fn(&str) -> Option<String>,
    secret: Option<&Secret>,
    options: &[(String, String)],
) -> BTreeMap<&'static str, String> {
    let mut settings = BTreeMap::new();
    for (key, variables, name) in SETTINGS {
        let given = options.iter().rev().find(|(k, _)| k == key);
        let value = given
            .map(|(_, value)| value.clone())
            .or_else(|| Some(secret?.get(name)?.to_owned()))
            .or_else(|| {
                variables
                    .iter()
                    .find_map(|v| secret?.get(v))
                    .map(str::to_owned)
            })
            .or_else(|| {
                let counts = secret.is_none() || !IDENTITY.contains(&key);
                counts.then(|| variables.iter().find_map(|v| variable(v)))?
            });
        if let Some(value) = value.filter(|v| !v.is_empty()) {
            settings.insert(key, value);
        }
    }
    settings
}

/// Who logs in where; or what is missing.
fn login(settings: &BTreeMap<&'static str, String>) -> Result<Login, String> {
    let get = |key: &str| settings.get(key).cloned();
    if let (Some(url), Some(token)) = (get("storage_url"), get("auth_token")) {
        return Ok(Login::Token { url, token });
    }
    let url = get("auth_url").ok_or("it needs auth_url (OS_AUTH_URL)")?;
    let url = url.trim_end_matches('/').to_owned();
    let user = get("username");
    let domain = match (get("domain_id"), get("domain_name")) {
        (Some(id), _) => json!({"id": id}),
        (None, Some(name)) => json!({"name": name}),
        (None, None) => json!({"id": "default"}),
    };
    if url.contains("/auth/v1") {
        return Ok(Login::V1 {
            url,
            user: user.ok_or("it needs username (ST_USER)")?,
            key: get("password").ok_or("it needs password (ST_KEY)")?,
        });
    }
    let credential = get("application_credential_secret");
    let mut auth = json!({});
    if let Some(secret) = credential {
        let credential = match (
            get("application_credential_id"),
            get("application_credential_name"),
            user,
        ) {
            (Some(id), _, _) => json!({"id": id, "secret": secret}),
            (None, Some(name), Some(user)) => {
                json!({"name": name, "secret": secret, "user": {"name": user, "domain": domain}})
            }
            _ => {
                return Err(
                    "an application credential needs its ID, or its name and username".to_owned(),
                );
            }
        };
        // Such a credential belongs to one project, and must not name any.
        auth["identity"] =
            json!({"methods": ["application_credential"], "application_credential": credential});
    } else {
        let user = user.ok_or("it needs username (OS_USERNAME)")?;
        let password = get("password").ok_or("it needs password (OS_PASSWORD)")?;
        auth["identity"] = json!({
            "methods": ["password"],
            "password": {"user": {"name": user, "domain": domain, "password": password}},
        });
        let project_domain = match get("project_domain_name") {
            Some(name) => json!({"name": name}),
            None => domain,
        };
        auth["scope"] = match (get("tenant_id"), get("tenant_name")) {
            (Some(id), _) => json!({"project": {"id": id}}),
            (None, Some(name)) => json!({"project": {"name": name, "domain": project_domain}}),
            (None, None) => return Err("it needs tenant_name (OS_PROJECT_NAME)".to_owned()),
        };
    }
    let interface = get("interface").unwrap_or_else(|| "public".to_owned());
    Ok(Login::V3 {
        url: match url.ends_with("/v3") {
            true => url,
            false => format!("{url}/v3"),
        },
        request: json!({ "auth": auth }),
        region: get("region"),
        interface: interface.trim_end_matches("URL").to_owned(),
        storage_url: get("storage_url"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(given: &[(&'static str, &str)]) -> Result<Login, String> {
        login(&given.iter().map(|(k, v)| (*k, (*v).to_owned())).collect())
    }

    #[test]
    fn what_is_given_wins_over_the_environment() {
        let options = [("region".to_owned(), "given".to_owned())];
        let variable = |name: &str| match name {
            "OS_REGION_NAME" => Some("of the environment".to_owned()),
            "ST_USER" => Some("u".to_owned()),
            "OS_PASSWORD" => Some(String::new()),
            _ => None,
        };
        let settings = settings(variable, None, &options);
        assert_eq!(settings["region"], "given");
        assert_eq!(settings["username"], "u");
        assert!(!settings.contains_key("password"));
    }

    #[test]
    fn with_a_secret_nobody_logs_in_as_the_environment_says() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        std::fs::write(file("OS_AUTH_URL"), "https://k.example").unwrap();
        std::fs::write(file("OS_USERNAME"), "u").unwrap();
        std::fs::write(file("username"), "own").unwrap();
        let secret = super::super::secret::Source::Folder(folder.path().to_owned());
        let secret = secret.read().unwrap();
        let variable = |name: &str| Some(format!("{name} of the environment"));
        let settings = settings(variable, Some(&secret), &[]);
        assert_eq!(settings["auth_url"], "https://k.example");
        assert_eq!(settings["username"], "own");
        assert_eq!(settings["region"], "OS_REGION_NAME of the environment");
        for key in ["password", "application_credential_secret", "auth_token"] {
            assert!(!settings.contains_key(key), "{key}");
        }
    }

    #[test]
    fn a_password_is_for_a_project_and_a_credential_for_its_own() {
        let base = [
            ("auth_url", "https://k.example:5000/"),
            ("username", "u"),
            ("password", "p"),
            ("domain_name", "d"),
        ];
        assert!(with(&base).err().unwrap().contains("tenant_name"));
        let scoped = [base.as_slice(), &[("tenant_name", "t"), ("region", "r")]].concat();
        let Login::V3 {
            url,
            request,
            region,
            interface,
            ..
        } = with(&scoped).unwrap()
        else {
            panic!("another login");
        };
        assert_eq!(
            (url.as_str(), region.as_deref()),
            ("https://k.example:5000/v3", Some("r"))
        );
        assert_eq!(interface, "public");
        let user = &request["auth"]["identity"]["password"]["user"];
        assert_eq!(
            user,
            &json!({"name": "u", "domain": {"name": "d"}, "password": "p"})
        );
        let project = &request["auth"]["scope"]["project"];
        assert_eq!(project, &json!({"name": "t", "domain": {"name": "d"}}));
        let credential = [
            scoped.as_slice(),
            &[
                ("application_credential_secret", "s"),
                ("application_credential_name", "n"),
            ],
        ]
        .concat();
        let Login::V3 { request, .. } = with(&credential).unwrap() else {
            panic!("another login");
        };
        assert_eq!(request["auth"].get("scope"), None);
        let credential = &request["auth"]["identity"]["application_credential"];
        assert_eq!(credential["user"]["name"], "u");
    }

    #[test]
    fn the_first_version_has_a_user_and_a_key() {
        let given = [
            ("auth_url", "http://s.example/auth/v1.0"),
            ("username", "test:tester"),
            ("password", "testing"),
        ];
        assert!(matches!(with(&given).unwrap(), Login::V1 { user, .. } if user == "test:tester"));
    }
}
