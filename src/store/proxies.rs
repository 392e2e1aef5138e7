//! The proxy of a request, by the variables that other tools take: `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and
//! `NO_PROXY`, in either case.
//!
//! As in Go's tools, no proxy is used for loopback addresses, and `NO_PROXY` may name ports. Called by `connect`.

use std::net::IpAddr;
use url::Url;

/// The variables.
#[derive(Debug, Clone, Default)]
pub(super) struct Proxies {
    https: Option<String>,
    http: Option<String>,
    all: Option<String>,
    excluded: Vec<String>,
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
            excluded: excluded
                .split(',')
                .map(|part| part.trim().to_lowercase())
                .collect(),
        }
    }

    /// Returns the proxy for a URL.
    pub(super) fn of_url(&self, url: &Url) -> Option<&str> {
        let own = match url.scheme() {
            "https" => &self.https,
            _ => &self.http,
        };
        let proxy = own.as_ref().or(self.all.as_ref())?;
        let host = url.host_str()?.trim_matches(['[', ']']).to_lowercase();
        let port = url.port_or_known_default();
        let is_loopback = host == "localhost"
            || host
                .parse::<IpAddr>()
                .is_ok_and(|address| address.is_loopback());
        let is_excluded = self
            .excluded
            .iter()
            .any(|entry| excludes(entry, &host, port));
        (!is_loopback && !is_excluded).then_some(proxy)
    }
}

/// Whether an entry of `NO_PROXY` names a host: `*`, an address, a range of addresses, or a domain with all below it;
/// with a port or without.
fn excludes(entry: &str, host: &str, port: Option<u16>) -> bool {
    if entry == "*" {
        return true;
    }
    // An address of IPv6 with a port has brackets.
    let (name, of_port) = match entry.rsplit_once(':') {
        Some((name, digits)) if !name.contains(':') || name.ends_with(']') => {
            match digits.parse::<u16>() {
                Ok(port) => (name, Some(port)),
                Err(_) => return false,
            }
        }
        _ => (entry, None),
    };
    if of_port.is_some() && of_port != port {
        return false;
    }
    let name = name.trim_matches(['[', ']']);
    if let Ok(address) = host.parse::<IpAddr>() {
        return match name.split_once('/') {
            Some((network, bits)) => is_within(address, network, bits),
            None => name.parse() == Ok(address),
        };
    }
    let domain = name.trim_start_matches("*.").trim_start_matches('.');
    let below = host.strip_suffix(domain);
    !domain.is_empty()
        && below.is_some_and(|below| {
            (below.is_empty() && !name.starts_with(['.', '*'])) || below.ends_with('.')
        })
}

fn is_within(address: IpAddr, network: &str, bits: &str) -> bool {
    let bits_of = |address: IpAddr| match address {
        IpAddr::V4(v4) => (u128::from(v4.to_bits()) << 96, 32),
        IpAddr::V6(v6) => (v6.to_bits(), 128),
    };
    let (Ok(network), Ok(bits)) = (network.parse::<IpAddr>(), bits.parse::<u32>()) else {
        return false;
    };
    let ((one, length), (two, other)) = (bits_of(address), bits_of(network));
    length == other && bits <= length && (bits == 0 || (one ^ two) >> (128 - bits) == 0)
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
            ("https://internal/", Some("http://secure:3128")),
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
