//! The flags that select a live etcd, named as etcdctl's own.
//!
//! `snapshot`, `apply`, `verify` and `maintain` use them. Nothing is sent to etcd here.

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
    /// etcd user, with the password unless --password or --password-file is given
    ///
    /// Other users of the machine can see a password on the command line: set DELTAFOLD_PASSWORD instead.
    #[arg(long, value_name = "NAME[:PASSWORD]", hide_env_values = true)]
    user: Option<String>,
    /// Password of the etcd user
    #[arg(
        long,
        value_name = "PASSWORD",
        hide_env_values = true,
        requires = "user"
    )]
    password: Option<String>,
    /// File that holds the password, such as a file of a mounted Secret
    #[arg(
        long,
        value_name = "FILE",
        requires = "user",
        conflicts_with = "password"
    )]
    password_file: Option<PathBuf>,
}

impl EndpointArgs {
    /// The endpoints, with the user from the flags.
    ///
    /// # Errors
    /// `Usage` if the user has no password; `Configuration` if the password file cannot be read.
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

    /// Whether any endpoint is given.
    pub(super) fn is_given(&self) -> bool {
        !self.endpoints.endpoints.is_empty()
    }

    /// A client for keys, which uses any of the endpoints.
    pub(super) fn connect(&self, cancel: &Cancel) -> Result<Client> {
        Client::connect(self.options()?, Handle::current(), cancel.clone())
    }

    /// A connector to each member.
    pub(super) fn connector(&self, cancel: &Cancel) -> Result<Connector> {
        Connector::new(self.options()?, Handle::current(), cancel.clone())
    }
}

/// Reads the password from a file, without the line break at its end.
fn read_password(path: &Path) -> Result<String> {
    let text = std::fs::read_to_string(path).map_err(|e| {
        Reason::Configuration.error(format!(
            "--password-file {} cannot be read: {e}",
            path.display()
        ))
    })?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

/// The user from --user and the password, which --user may contain (NAME:PASSWORD).
fn user(user: Option<&str>, password: Option<&str>) -> Result<Option<User>> {
    let Some(user) = user else { return Ok(None) };
    let (name, password) = match (password, user.split_once(':')) {
        (Some(password), _) => (user, password),
        (None, Some(both)) => both,
        (None, None) => {
            return Err(Reason::Usage.error("--user has no password: give --password-file, --password (preferably as DELTAFOLD_PASSWORD) or --user NAME:PASSWORD"));
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
        let parsed = |u, p| user(u, p).map(|u| u.map(|u| (u.name, u.password)));
        let pair = |n: &str, p: &str| Some((n.to_owned(), p.to_owned()));
        assert_eq!(parsed(None, None).unwrap(), None);
        assert_eq!(parsed(Some("root:a:b"), None).unwrap(), pair("root", "a:b"));
        assert_eq!(
            parsed(Some("ro:ot"), Some("x")).unwrap(),
            pair("ro:ot", "x")
        );
        assert_eq!(
            parsed(Some("root"), None).unwrap_err().reason(),
            Reason::Usage
        );
    }
}
