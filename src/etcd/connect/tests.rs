//! Which endpoints are accepted and used, and that passwords stay hidden.

use super::*;

fn options_for(endpoints: &[&str], cacert: Option<&str>) -> Endpoints {
    Endpoints {
        endpoints: endpoints.iter().map(|&e| e.to_owned()).collect(),
        cacert: cacert.map(PathBuf::from),
        cert: None,
        key: None,
        tls_secret: None,
        auth_secret: None,
        user: Some(User {
            name: "root".to_owned(),
            password: "secret".to_owned(),
        }),
        dial_timeout: Duration::from_secs(2),
        command_timeout: Duration::from_secs(5),
        keepalive_time: Duration::from_secs(10),
        keepalive_timeout: Duration::from_secs(10),
    }
}

#[test]
fn a_forged_member_url_without_tls_is_not_used() {
    let plain = "http://evil:2379";
    for endpoints in [
        &["https://a:2379"][..],
        &["https://a:2379", "http://b:2379"],
    ] {
        let options = options_for(endpoints, None);
        assert!(!may_use(&options, plain), "{endpoints:?}");
        assert!(!may_use(&options, "HTTP://evil:2379"));
        assert!(!may_use(&options, "evil:2379"));
        assert!(may_use(&options, "https://c:2379"));
        assert!(endpoints.iter().all(|e| may_use(&options, e)));
    }
    // Certificate flags request TLS for endpoints without a scheme.
    let options = options_for(&["a:2379"], Some("ca.crt"));
    assert!(!may_use(&options, plain));
    assert!(may_use(&options, "a:2379"));
    let options = options_for(&["http://a:2379"], None);
    assert!(may_use(&options, "http://c:2379"));
}

#[test]
fn a_listener_without_tls_gets_no_password() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let options = options_for(&["https://127.0.0.1:1"], None);
    let connector = Connector::new(options, runtime.handle().clone(), Cancel::default()).unwrap();
    let Err(AttemptError::Final(e)) = connector.dial(&url, Streams::Plain) else {
        panic!("the listener was used");
    };
    assert_eq!(e.reason(), Reason::Configuration);
    assert!(!e.to_string().contains("secret"), "{e}");
    let accepted = listener.accept().map(|_| ());
    assert_eq!(accepted.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn invalid_endpoints_are_refused_without_showing_passwords() {
    for good in [
        "http://a:2379",
        "https://a:2379",
        "a:2379",
        "http://[::1]:2379/",
    ] {
        check_endpoint(good, false).unwrap();
    }
    check_endpoint("https://a:2379", true).unwrap();
    check_endpoint("a:2379", true).unwrap();
    for bad in ["", "http://", "ftp://a", "unix:///a", "http://u:secret@a:1"] {
        let e = check_endpoint(bad, false).unwrap_err();
        assert_eq!(e.reason(), Reason::Usage, "{bad}");
        assert!(!e.to_string().contains("secret"), "{e}");
    }
    assert!(check_endpoint("http://a:2379", true).is_err());
}

#[test]
fn debug_output_hides_the_password() {
    let user = User {
        name: "root".to_owned(),
        password: "secret".to_owned(),
    };
    let shown = format!("{user:?}");
    assert!(
        shown.contains("root") && !shown.contains("secret"),
        "{shown}"
    );
}
