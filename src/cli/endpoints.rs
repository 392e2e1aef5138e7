//! How a live etcd is reached: the flags, named as etcdctl's own.

use crate::base::{Cancel, duration};
use crate::error::{Error, Reason, Result};
use crate::etcd::client::Client;
use crate::etcd::connect::{Connector, Endpoints, User};
use clap::Args;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::runtime::Handle;

/// The live etcd.
#[derive(Debug, Args)]
#[command(next_help_heading = "Live etcd")]
pub(super) struct EndpointArgs {
    /// URLs of its members, with commas; tried in turn
    #[arg(long, value_name = "URLS", value_delimiter = ',', required = true)]
    endpoints: Vec<String>,
    /// PEM of the authorities of its certificates [default: the system's]
    #[arg(long, value_name = "FILE")]
    cacert: Option<PathBuf>,
    /// PEM of the client's certificate
    #[arg(long, value_name = "FILE", requires = "key")]
    cert: Option<PathBuf>,
    /// PEM of the client's key
    #[arg(long, value_name = "FILE", requires = "cert")]
    key: Option<PathBuf>,
    /// A user of etcd, and the password unless --password gives it
    ///
    /// On the command line other users of the machine may see the password: give it as
    /// DELTAFOLD_PASSWORD.
    #[arg(long, value_name = "NAME[:PASSWORD]", hide_env_values = true)]
    user: Option<String>,
    /// The user's password
    #[arg(
        long,
        value_name = "PASSWORD",
        hide_env_values = true,
        requires = "user"
    )]
    password: Option<String>,
    /// A file that holds the password, such as one of a mounted Secret
    #[arg(
        long,
        value_name = "FILE",
        requires = "user",
        conflicts_with = "password"
    )]
    password_file: Option<PathBuf>,
    /// How long to wait for a connection
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = duration::parse_above_zero)]
    dial_timeout: Duration,
    /// How long to wait for an answer
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = duration::parse_above_zero)]
    command_timeout: Duration,
    /// A connection that is silent for so long is looked after
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration::parse_above_zero)]
    keepalive_time: Duration,
    /// And given up after so long without an answer
    #[arg(long, value_name = "DURATION", default_value = "6s", value_parser = duration::parse_above_zero)]
    keepalive_timeout: Duration,
}

impl EndpointArgs {
    /// How to reach it; nothing is looked at yet.
    pub(super) fn options(&self) -> Result<Endpoints> {
        let from_file = self
            .password_file
            .as_deref()
            .map(read_password)
            .transpose()?;
        let password = from_file.as_deref().or(self.password.as_deref());
        let user = user(self.user.as_deref(), password)?;
        Ok(Endpoints {
            endpoints: self.endpoints.iter().map(|e| e.trim().to_owned()).collect(),
            cacert: self.cacert.clone(),
            cert: self.cert.clone(),
            key: self.key.clone(),
            user,
            dial_timeout: self.dial_timeout,
            command_timeout: self.command_timeout,
            keepalive_time: self.keepalive_time,
            keepalive_timeout: self.keepalive_timeout,
        })
    }

    /// Whether any was named.
    pub(super) fn is_given(&self) -> bool {
        !self.endpoints.is_empty()
    }

    /// A connection to its keys.
    pub(super) fn connect(&self, cancel: &Cancel) -> Result<Client> {
        Client::connect(self.options()?, Handle::current(), cancel.clone())
    }

    /// The way to each of its members; nothing is sent yet.
    pub(super) fn connector(&self, cancel: &Cancel) -> Result<Connector> {
        Connector::new(self.options()?, Handle::current(), cancel.clone())
    }
}

/// The password in a file: without the line's end that editors leave.
fn read_password(path: &Path) -> Result<String> {
    let text = std::fs::read_to_string(path).map_err(|e| {
        Error::new(
            Reason::Configuration,
            format!("--password-file {} cannot be read: {e}", path.display()),
        )
    })?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

/// The user, from the two flags.
fn user(user: Option<&str>, password: Option<&str>) -> Result<Option<User>> {
    let Some(user) = user else { return Ok(None) };
    let (name, password) = match (password, user.split_once(':')) {
        (Some(password), _) => (user, password),
        (None, Some(both)) => both,
        (None, None) => {
            return Err(Error::new(
                Reason::Usage,
                "--user has no password: give --user NAME:PASSWORD, --password (best as DELTAFOLD_PASSWORD) or --password-file",
            ));
        }
    };
    Ok(Some(User {
        name: name.to_owned(),
        password: password.to_owned(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_comes_with_a_password_from_either_flag() {
        let of = |u, p| user(u, p).map(|u| u.map(|u| (u.name, u.password)));
        let pair = |n: &str, p: &str| Some((n.to_owned(), p.to_owned()));
        assert_eq!(of(None, None).unwrap(), None);
        assert_eq!(of(Some("root:a:b"), None).unwrap(), pair("root", "a:b"));
        assert_eq!(of(Some("ro:ot"), Some("x")).unwrap(), pair("ro:ot", "x"));
        assert_eq!(of(Some("root"), None).unwrap_err().reason(), Reason::Usage);
    }
}
