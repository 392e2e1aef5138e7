//! The files that AWS's tools share: `~/.aws/credentials` and `~/.aws/config`, and the profile in them.
//!
//! They count if neither an option, nor a Secret, nor a variable gives credentials. Of a profile, the keys, the region
//! and the endpoint are read.

use crate::error::{Error, Reason, Result};
use configparser::ini::Ini;
use std::path::PathBuf;

/// What the files of a machine are, by the variables that name them.
pub(super) struct ProfileFiles {
    /// The profile's name, if a variable gives it.
    profile: Option<String>,
    credentials: Option<PathBuf>,
    config: Option<PathBuf>,
}

impl ProfileFiles {
    /// Returns the files for these variables.
    pub(super) fn of(variable: impl Fn(&str) -> Option<String>) -> Self {
        let home = variable("HOME").map(PathBuf::from);
        let file = |name: &str, below: &str| {
            let named = variable(name).map(PathBuf::from);
            named.or_else(|| home.as_ref().map(|home| home.join(".aws").join(below)))
        };
        ProfileFiles {
            profile: variable("AWS_PROFILE").or_else(|| variable("AWS_DEFAULT_PROFILE")),
            credentials: file("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
            config: file("AWS_CONFIG_FILE", "config"),
        }
    }

    /// Reads the settings of the profile. Without files there are none.
    ///
    /// # Errors
    /// Fails with `Configuration` if a file cannot be read, or if the profile that a variable names is missing or has no
    /// keys.
    pub(super) fn settings(&self) -> Result<Vec<(String, String)>> {
        let profile = self.profile.as_deref().unwrap_or("default");
        let in_config = match profile {
            "default" => profile.to_owned(),
            named => format!("profile {named}"),
        };
        let mut settings = Vec::new();
        let mut other = None;
        for (file, section) in [
            (&self.config, in_config),
            (&self.credentials, profile.to_owned()),
        ] {
            let Some(file) = file.as_ref().filter(|file| file.is_file()) else {
                continue;
            };
            // The names of profiles are case-sensitive.
            let mut ini = Ini::new_cs();
            ini.set_inline_comment_symbols(Some(&[]));
            let read = std::fs::read_to_string(file).map_err(|e| e.to_string());
            let read = read.and_then(|text| ini.read(text));
            read.map_err(|e| wrong(&format!("cannot read {}: {e}", file.display())))?;
            for (name, key) in [
                ("aws_access_key_id", "access_key_id"),
                ("aws_secret_access_key", "secret_access_key"),
                ("aws_session_token", "session_token"),
                ("region", "region"),
                ("endpoint_url", "endpoint"),
            ] {
                let value = ini
                    .get(&section, name)
                    .filter(|value| !value.trim().is_empty());
                settings.extend(value.map(|value| (key.to_owned(), value.trim().to_owned())));
            }
            let ways = [
                "role_arn",
                "sso_session",
                "sso_start_url",
                "credential_process",
            ];
            other = other.or(ways
                .into_iter()
                .find(|way| ini.get(&section, way).is_some()));
        }
        let has_keys = settings.iter().any(|(key, _)| key == "access_key_id");
        match (&self.profile, has_keys, other) {
            (Some(profile), false, Some(way)) => Err(wrong(&format!(
                "the profile {profile} gets its credentials by {way}, which deltafold does not do: give keys, a role by AWS_WEB_IDENTITY_TOKEN_FILE, or the variables that `aws configure export-credentials --format env` prints"
            ))),
            (Some(profile), false, None) => Err(wrong(&format!(
                "AWS_PROFILE is {profile}, and neither {} nor {} has its keys",
                shown(&self.credentials),
                shown(&self.config)
            ))),
            // Another way, such as the role of the machine, gives the credentials.
            (None, false, _) => Ok(settings
                .into_iter()
                .filter(|(key, _)| key == "region")
                .collect()),
            (_, true, _) => Ok(settings),
        }
    }
}

fn shown(file: &Option<PathBuf>) -> String {
    let file = file.as_ref().map(|file| file.display().to_string());
    file.unwrap_or_else(|| "a file in the home folder".to_owned())
}

fn wrong(what: &str) -> Error {
    Reason::Configuration.error(format!("AWS's shared files: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_keys_of_a_profile_are_read() {
        let home = tempfile::tempdir().unwrap();
        let aws = home.path().join(".aws");
        fs::create_dir(&aws).unwrap();
        let settings = |profile: Option<&str>| {
            let files = ProfileFiles::of(|name| match name {
                "HOME" => Some(home.path().to_str().unwrap().to_owned()),
                "AWS_PROFILE" => profile.map(str::to_owned),
                _ => None,
            });
            files.settings().map_err(|e| e.to_string())
        };
        assert_eq!(settings(None), Ok(Vec::new()));
        let e = settings(Some("backup")).unwrap_err();
        assert!(e.contains("AWS_PROFILE is backup"), "{e}");
        fs::write(
            aws.join("credentials"),
            "[default]\naws_access_key_id = D\naws_secret_access_key = s/+#;=x\n\n[backup]\naws_access_key_id=B\naws_secret_access_key=t\naws_session_token=\n",
        )
        .unwrap();
        fs::write(
            aws.join("config"),
            "[default]\nregion = eu-west-1\n[profile backup]\nregion = eu-central-1\nendpoint_url = https://s3.example\n[profile sso]\nsso_session = x\n",
        )
        .unwrap();
        let pairs = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            let owned = pairs
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
            owned.collect()
        };
        let default = [
            ("region", "eu-west-1"),
            ("access_key_id", "D"),
            ("secret_access_key", "s/+#;=x"),
        ];
        assert_eq!(settings(None), Ok(pairs(&default)));
        let backup = [
            ("region", "eu-central-1"),
            ("endpoint", "https://s3.example"),
            ("access_key_id", "B"),
            ("secret_access_key", "t"),
        ];
        assert_eq!(settings(Some("backup")), Ok(pairs(&backup)));
        let e = settings(Some("sso")).unwrap_err();
        assert!(e.contains("by sso_session"), "{e}");
    }
}
