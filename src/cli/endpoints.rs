//! How a live etcd is reached: the flags, named as etcdctl's own.

use crate::base::Cancel;
use crate::error::{Reason, Result};
use crate::etcd::client::Client;
use crate::etcd::connect::{Connector, Endpoints, User};
use clap::Args;
use std::path::{Path, PathBuf};
use tokio::runtime::Handle;

/// The live etcd.
#[derive(Debug, Args)]
#[command(next_help_heading = "Live etcd")]
pub(super) struct EndpointArgs {
    #[command(flatten)]
    endpoints: Endpoints,
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
            user,
            ..self.endpoints.clone()
        })
    }

    /// Whether any was named.
    pub(super) fn is_given(&self) -> bool {
        !self.endpoints.endpoints.is_empty()
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
        Reason::Configuration.error(format!(
            "--password-file {} cannot be read: {e}",
            path.display()
        ))
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
            return Err(Reason::Usage.error("--user has no password: give --user NAME:PASSWORD, --password (best as DELTAFOLD_PASSWORD) or --password-file"));
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
