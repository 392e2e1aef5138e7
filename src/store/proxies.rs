//! The proxy of a request, by the variables that other tools take: `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and
//! `NO_PROXY`, in either case.
//!
//! As in Go's tools, no proxy is used for loopback addresses, and `NO_PROXY` may name ports. Its other rules are
//! hyper-util's, which reqwest uses.

use hyper_util::client::proxy::matcher::Matcher;
use url::Url;

/// What is asked without a proxy.
const LOOPBACK: &str = "localhost,127.0.0.0/8,::1";

/// The variables.
#[derive(Debug, Clone, Default)]
pub(super) struct Proxies {
    https: Option<String>,
    http: Option<String>,
    all: Option<String>,
    /// Names, addresses and networks, and the port of each if it has one.
    excluded: Vec<(String, Option<u16>)>,
}

impl Proxies {
    /// Reads the variables. One that is empty is not set.
    pub(super) fn from_env() -> Self {
        Self::of(|name| std::env::var(name).ok())
    }

    fn of(variable: impl Fn(&str) -> Option<String>) -> Self {
        let either = |name: &str| {
            let values = [name.to_lowercase(), name.to_owned()].into_iter();
            let mut values = values.filter_map(|name| variable(&name));
            values.find(|value| !value.trim().is_empty())
        };
        let excluded = either("NO_PROXY").unwrap_or_default();
        Proxies {
            https: either("HTTPS_PROXY"),
            http: either("HTTP_PROXY"),
            all: either("ALL_PROXY"),
            excluded: excluded.split(',').map(entry).collect(),
        }
    }

    /// Returns the proxy for a URL.
    pub(super) fn of_url(&self, url: &Url) -> Option<&str> {
        let own = match url.scheme() {
            "https" => &self.https,
            _ => &self.http,
        };
        let proxy = own.as_ref().or(self.all.as_ref())?;
        let port = url.port_or_known_default();
        let excluded = self.excluded.iter();
        let excluded = excluded.filter(|(_, of_port)| of_port.is_none() || *of_port == port);
        let names = excluded.map(|(name, _)| name.as_str());
        let names = Vec::from_iter(std::iter::once(LOOPBACK).chain(names)).join(",");
        // What is not excluded would go to this one.
        let rules = Matcher::builder().all("http://proxy").no(names).build();
        let is_excluded = rules.intercept(&url.as_str().parse().ok()?).is_none();
        (!is_excluded).then_some(proxy)
    }
}

/// Takes an entry of `NO_PROXY` apart. An address of IPv6 with a port has brackets.
fn entry(entry: &str) -> (String, Option<u16>) {
    let entry = entry.trim();
    let (name, port) = match entry.rsplit_once(':') {
        Some((name, port)) if !name.contains(':') || name.ends_with(']') => match port.parse() {
            Ok(port) => (name, Some(port)),
            Err(_) => ("", None),
        },
        _ => (entry, None),
    };
    let name = name.trim_matches(['[', ']']);
    (
        name.strip_prefix("*.")
            .map_or(name.to_owned(), |d| format!(".{d}")),
        port,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_and_what_is_named_go_without_a_proxy() {
        let proxies = Proxies::of(|name| {
            let value = match name {
                "HTTPS_PROXY" => "http://secure:3128",
                "http_proxy" => "http://plain:3128",
                "HTTP_PROXY" => "http://not-this-one:1",
                "all_proxy" => "",
                "NO_PROXY" => {
                    "minio.example:9000, .internal,corp.example,10.0.0.0/8,192.168.1.7,[fd00::1]:443,fd01::/16"
                }
                _ => return None,
            };
            Some(value.to_owned())
        });
        for (url, expected) in [
            ("https://s3.example/b", Some("http://secure:3128")),
            ("http://s3.example/b", Some("http://plain:3128")),
            ("http://localhost:9000/", None),
            ("http://127.0.0.53:9000/", None),
            ("https://[::1]:9000/", None),
            ("http://minio.example:9000/", None),
            ("http://minio.example:9001/", Some("http://plain:3128")),
            ("https://a.internal/", None),
            ("https://corp.example/", None),
            ("https://a.corp.example/", None),
            ("https://notcorp.example/", Some("http://secure:3128")),
            ("https://10.1.2.3/", None),
            ("https://11.1.2.3/", Some("http://secure:3128")),
            ("https://192.168.1.7/", None),
            ("https://[fd00::1]/", None),
            ("https://[fd00::1]:9000/", Some("http://secure:3128")),
            ("https://[fd01::5]/", None),
        ] {
            assert_eq!(proxies.of_url(&Url::parse(url).unwrap()), expected, "{url}");
        }
        let all = Proxies::of(|name| (name == "ALL_PROXY").then(|| "socks5://p:1".to_owned()));
        let url = Url::parse("https://s3.example/").unwrap();
        assert_eq!(all.of_url(&url), Some("socks5://p:1"));
        let none =
            Proxies::of(|name| Some(if name == "no_proxy" { "*" } else { "http://p" }.to_owned()));
        assert_eq!(none.of_url(&url), None);
    }
}
