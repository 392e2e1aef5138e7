//! A proxy that refuses some requests, as a server does if a role lacks a right.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use super::s3::S3;

/// Starts a proxy in front of `server` (`http://host:port`). It responds with 403 to requests for whose first
/// line `denied` returns true. It ends with the process.
pub fn denying(server: &str, denied: fn(&str) -> bool) -> S3 {
    let server = server.trim_start_matches("http://").to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let server = server.clone();
            // The client reports a broken connection.
            std::thread::spawn(move || pass_on(client, &server, denied));
        }
    });
    S3::new(&format!("http://{address}"))
}

/// Forwards one request of a connection, then closes it.
fn pass_on(mut client: TcpStream, server: &str, denied: fn(&str) -> bool) -> io::Result<()> {
    const REFUSAL: &str =
        "<Error><Code>AccessDenied</Code><Message>Access Denied.</Message></Error>";
    let mut reader = BufReader::new(client.try_clone()?);
    let mut first = String::new();
    reader.read_line(&mut first)?;
    let (mut head, mut length) = (first.clone(), 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line.trim_end().is_empty() {
            break;
        }
        let lower = line.to_lowercase();
        if let Some(value) = lower.strip_prefix("content-length:") {
            length = value.trim().parse().map_err(io::Error::other)?;
        }
        if !lower.starts_with("connection:") {
            head.push_str(&line);
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    if denied(&first) {
        return write!(
            client,
            "HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{REFUSAL}",
            REFUSAL.len()
        );
    }
    let mut there = TcpStream::connect(server)?;
    write!(there, "{head}Connection: close\r\n\r\n")?;
    there.write_all(&body)?;
    io::copy(&mut there, &mut client)?;
    Ok(())
}
