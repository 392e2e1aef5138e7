//! Opens OpenStack Swift: reads the user, the URL and the other login settings from options, a Secret and
//! environment variables.
//!
//! Does not log in: `store::swift` does, with the first request.

use super::secret::{Secret, SecretDerived};
use super::{Family, Location, OpenConfig, no_such_setting};
use crate::base::opt::STORE;
use crate::error::{Reason, Result};
use crate::store::exclude::ExcludeTags;
use crate::store::swift::{Login, Swift};
use crate::store::{LookFirst, Store};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::runtime::Handle;

/// A setting of Swift.
struct Setting {
    /// The name as a `--store-option`.
    option: &'static str,
    /// The environment variables. The first that is set counts.
    variables: &'static [&'static str],
    /// The name in a Secret.
    secret: &'static str,
    /// Whether the setting is a part of the credentials.
    is_credential: bool,
}

impl Setting {
    const fn new(
        option: &'static str,
        variables: &'static [&'static str],
        secret: &'static str,
    ) -> Self {
        Setting {
            option,
            variables,
            secret,
            is_credential: false,
        }
    }

    const fn credential(
        option: &'static str,
        variables: &'static [&'static str],
        secret: &'static str,
    ) -> Self {
        Setting {
            is_credential: true,
            ..Setting::new(option, variables, secret)
        }
    }
}

static SETTINGS: [Setting; 15] = [
    Setting::new("auth_url", &["OS_AUTH_URL", "ST_AUTH"], "authURL"),
    Setting::credential("username", &["OS_USERNAME", "ST_USER"], "username"),
    Setting::credential("password", &["OS_PASSWORD", "ST_KEY"], "password"),
    Setting::new(
        "domain_name",
        &["OS_DOMAIN_NAME", "OS_USER_DOMAIN_NAME"],
        "domainName",
    ),
    Setting::new("domain_id", &["OS_USER_DOMAIN_ID"], "domainID"),
    Setting::new(
        "project_domain_name",
        &["OS_PROJECT_DOMAIN_NAME"],
        "projectDomainName",
    ),
    Setting::new(
        "tenant_name",
        &["OS_PROJECT_NAME", "OS_TENANT_NAME"],
        "tenantName",
    ),
    Setting::new("tenant_id", &["OS_PROJECT_ID", "OS_TENANT_ID"], "tenantID"),
    Setting::new("region", &["OS_REGION_NAME"], "region"),
    Setting::new(
        "interface",
        &["OS_INTERFACE", "OS_ENDPOINT_TYPE"],
        "interface",
    ),
    Setting::credential(
        "application_credential_id",
        &["OS_APPLICATION_CREDENTIAL_ID"],
        "applicationCredentialID",
    ),
    Setting::credential(
        "application_credential_name",
        &["OS_APPLICATION_CREDENTIAL_NAME"],
        "applicationCredentialName",
    ),
    Setting::credential(
        "application_credential_secret",
        &["OS_APPLICATION_CREDENTIAL_SECRET"],
        "applicationCredentialSecret",
    ),
    Setting::new("storage_url", &["OS_STORAGE_URL"], "storageURL"),
    Setting::credential("auth_token", &["OS_AUTH_TOKEN"], "authToken"),
];

/// The values of the settings, by the names of the options.
type Values = BTreeMap<&'static str, String>;

pub(super) fn open(location: &Location, config: OpenConfig, handle: Handle) -> Result<Store> {
    let (mut client, options) = config.plain_client()?;
    if let Some((key, _)) = options
        .iter()
        .find(|(key, _)| SETTINGS.iter().all(|s| s.option != key))
    {
        return Err(no_such_setting(key));
    }
    let secret = config.read_secret()?;
    let url = location.url.clone();
    let read_login = move |secret: Option<&Secret>| login_from(&url, &options, secret);
    let initial = read_login(secret.as_ref())?;
    if initial.urls().any(|url| url.starts_with("http://")) {
        client = client.with_allow_http(true);
    }
    let http = config.http(&client, &location.action)?;
    let requests = config.requests.most();
    let login: Box<dyn Fn() -> Login + Send + Sync> = match (config.secret, secret) {
        (Some(source), Some(secret)) => {
            let derived =
                SecretDerived::new(source, secret, move |secret| read_login(Some(secret)))?;
            Box::new(move || derived.current())
        }
        _ => Box::new(move || initial.clone()),
    };
    let swift = Swift::new(http, location.bucket.clone(), config.retry, login);
    Ok(location
        .store(Arc::new(swift.clone()), ExcludeTags::none(), handle)
        .with_swift(swift)
        .with_requests(requests)
        .with_look_first(LookFirst::Large))
}

/// Returns the login from all settings, or an error that says what is missing.
fn login_from(url: &str, options: &[(String, String)], secret: Option<&Secret>) -> Result<Login> {
    let mut values = values(super::variable, secret, options);
    for (option, value) in &mut values {
        let setting = SETTINGS.iter().find(|s| s.option == *option);
        let variables = setting.map_or_else(String::new, |s| s.variables.join(", "));
        *value = super::checked(&format!("{option} ({variables})"), value)?;
    }
    let login = login(&values).map_err(|missing| {
        let is_given = |name: &str| is_given(options, name);
        if let Some(secret) = secret
            && !secret.has_credentials(Family::Swift, is_given)
        {
            return secret.lacks_credentials(Family::Swift);
        }
        Reason::Configuration.error(format!(
            "{STORE} {url}: {missing}; see docs/stores.md for Swift's settings"
        ))
    })?;
    let urls = values.iter().filter(|(option, _)| option.ends_with("_url"));
    for (option, url) in urls {
        super::check_endpoint(option, url)?;
    }
    Ok(login)
}

/// Returns whether a `--store-option` sets the setting that has this name in a Secret, or this environment
/// variable.
fn is_given(options: &[(String, String)], name: &str) -> bool {
    let setting = SETTINGS
        .iter()
        .find(|s| s.secret == name || s.variables.contains(&name));
    setting.is_some_and(|s| options.iter().any(|(key, _)| key == s.option))
}

/// Returns the values of all settings: from the options (the last of the same name), else from the Secret, else
/// from the environment. With a Secret, the environment gives no credentials. If the first source that has a
/// setting gives an empty value, the setting is missing: the other sources are not asked.
fn values(
    variable: impl Fn(&str) -> Option<String>,
    secret: Option<&Secret>,
    options: &[(String, String)],
) -> Values {
    let from_options = |setting: &Setting| {
        let option = options.iter().rev().find(|(key, _)| key == setting.option);
        option.map(|(_, value)| value.clone())
    };
    let from_secret = |setting: &Setting| {
        let secret = secret?;
        let value = secret.get(setting.secret);
        value
            .or_else(|| setting.variables.iter().find_map(|v| secret.get(v)))
            .map(str::to_owned)
    };
    let from_environment = |setting: &Setting| match secret {
        Some(_) if setting.is_credential => None,
        _ => setting.variables.iter().find_map(|v| variable(v)),
    };
    let mut values = Values::new();
    for setting in &SETTINGS {
        let value = from_options(setting)
            .or_else(|| from_secret(setting))
            .or_else(|| from_environment(setting));
        if let Some(value) = value.filter(|v| !v.is_empty()) {
            values.insert(setting.option, value);
        }
    }
    values
}

/// Returns the login, or a message that says which setting is missing.
fn login(values: &Values) -> Result<Login, String> {
    let get = |option: &str| values.get(option).cloned();
    if let (Some(url), Some(token)) = (get("storage_url"), get("auth_token")) {
        return Ok(Login::Token { url, token });
    }
    let url = get("auth_url").ok_or("it needs auth_url (OS_AUTH_URL)")?;
    let url = url.trim_end_matches('/').to_owned();
    if url.contains("/auth/v1") {
        return Ok(Login::V1 {
            url,
            user: get("username").ok_or("it needs username (ST_USER)")?,
            key: get("password").ok_or("it needs password (ST_KEY)")?,
        });
    }
    let auth = match get("application_credential_secret") {
        Some(secret) => application_credential(values, &secret)?,
        None => user_and_project(values)?,
    };
    let interface = get("interface").unwrap_or_else(|| "public".to_owned());
    Ok(Login::V3 {
        url: if url.ends_with("/v3") {
            url
        } else {
            format!("{url}/v3")
        },
        request: json!({ "auth": auth }),
        region: get("region"),
        interface: interface.trim_end_matches("URL").to_owned(),
        storage_url: get("storage_url"),
    })
}

/// Returns the domain of the user, as Keystone's requests have it.
fn user_domain(values: &Values) -> Value {
    match (values.get("domain_id"), values.get("domain_name")) {
        (Some(id), _) => json!({"id": id}),
        (None, Some(name)) => json!({"name": name}),
        (None, None) => json!({"id": "default"}),
    }
}

/// Returns the body of a Keystone login by application credential. An application credential belongs to one
/// project, so the request must not have a scope.
fn application_credential(values: &Values, secret: &str) -> Result<Value, String> {
    let credential = match (
        values.get("application_credential_id"),
        values.get("application_credential_name"),
        values.get("username"),
    ) {
        (Some(id), _, _) => json!({"id": id, "secret": secret}),
        (None, Some(name), Some(user)) => {
            let domain = user_domain(values);
            json!({"name": name, "secret": secret, "user": {"name": user, "domain": domain}})
        }
        _ => {
            return Err(
                "application_credential_secret also needs application_credential_id, or application_credential_name and username".to_owned(),
            );
        }
    };
    let identity =
        json!({"methods": ["application_credential"], "application_credential": credential});
    Ok(json!({ "identity": identity }))
}

/// Returns the body of a Keystone login by user and password, for one project.
fn user_and_project(values: &Values) -> Result<Value, String> {
    let domain = user_domain(values);
    let user = values
        .get("username")
        .ok_or("it needs username (OS_USERNAME)")?;
    let password = values
        .get("password")
        .ok_or("it needs password (OS_PASSWORD)")?;
    let project_domain = match values.get("project_domain_name") {
        Some(name) => json!({"name": name}),
        None => domain.clone(),
    };
    let scope = match (values.get("tenant_id"), values.get("tenant_name")) {
        (Some(id), _) => json!({"project": {"id": id}}),
        (None, Some(name)) => json!({"project": {"name": name, "domain": project_domain}}),
        (None, None) => {
            return Err(
                "it needs tenant_name (OS_PROJECT_NAME) or tenant_id (OS_PROJECT_ID)".to_owned(),
            );
        }
    };
    let identity = json!({
        "methods": ["password"],
        "password": {"user": {"name": user, "domain": domain, "password": password}},
    });
    Ok(json!({ "identity": identity, "scope": scope }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(given: &[(&'static str, &str)]) -> Result<Login, String> {
        login(&given.iter().map(|(k, v)| (*k, (*v).to_owned())).collect())
    }

    #[test]
    fn options_win_over_the_environment() {
        let options = [("region".to_owned(), "given".to_owned())];
        let variable = |name: &str| match name {
            "OS_REGION_NAME" => Some("from the environment".to_owned()),
            "ST_USER" => Some("u".to_owned()),
            "OS_PASSWORD" => Some(String::new()),
            _ => None,
        };
        let values = values(variable, None, &options);
        assert_eq!(values["region"], "given");
        assert_eq!(values["username"], "u");
        assert!(!values.contains_key("password"));
    }

    #[test]
    fn with_a_secret_the_environment_gives_no_credentials() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        std::fs::write(file("OS_AUTH_URL"), "https://k.example").unwrap();
        std::fs::write(file("OS_USERNAME"), "u").unwrap();
        std::fs::write(file("username"), "named").unwrap();
        let secret = super::super::secret::SecretSource::Folder(folder.path().to_owned());
        let secret = secret.read().unwrap();
        let variable = |name: &str| Some(format!("{name} from the environment"));
        let values = values(variable, Some(&secret), &[]);
        assert_eq!(values["auth_url"], "https://k.example");
        assert_eq!(values["username"], "named");
        assert_eq!(values["region"], "OS_REGION_NAME from the environment");
        for key in ["password", "application_credential_secret", "auth_token"] {
            assert!(!values.contains_key(key), "{key}");
        }
    }

    #[test]
    fn a_password_needs_a_project_and_an_application_credential_has_one() {
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
    fn version_1_has_a_user_and_a_key() {
        let given = [
            ("auth_url", "http://s.example/auth/v1.0"),
            ("username", "test:tester"),
            ("password", "testing"),
        ];
        assert!(matches!(with(&given).unwrap(), Login::V1 { user, .. } if user == "test:tester"));
    }
}
