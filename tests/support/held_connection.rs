//! A TCP proxy that holds one connection until the test has done something.

use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

/// A proxy in front of one server.
pub struct HoldingProxy {
    pub endpoint: String,
    connections: Arc<AtomicUsize>,
    /// The number of the connection that is held.
    held: Arc<AtomicUsize>,
    /// Tells that it has come, and takes that it goes on.
    came: Receiver<()>,
    go_on: Sender<()>,
}

impl HoldingProxy {
    /// Starts a proxy in front of `server`, a URL.
    pub fn start(server: &str) -> Self {
        let server = server.trim_start_matches("http://").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let (connections, held) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (told, came) = channel();
        let (go_on, goes_on) = channel();
        let (counted, is_held) = (Arc::clone(&connections), Arc::clone(&held));
        let goes_on = Arc::new(Mutex::new(goes_on));
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let nth = counted.fetch_add(1, Ordering::SeqCst) + 1;
                let (server, told) = (server.clone(), told.clone());
                let (is_held, goes_on) = (Arc::clone(&is_held), Arc::clone(&goes_on));
                std::thread::spawn(move || {
                    if nth == is_held.load(Ordering::SeqCst) {
                        let _ = told.send(());
                        let _ = goes_on.lock().unwrap().recv();
                    }
                    if let Ok(upstream) = TcpStream::connect(&server) {
                        pump(client, upstream);
                    }
                });
            }
        });
        HoldingProxy {
            endpoint,
            connections,
            held,
            came,
            go_on,
        }
    }

    /// Returns the number of connections since the last call.
    pub fn count(&self) -> usize {
        self.connections.swap(0, Ordering::SeqCst)
    }

    /// Holds the n-th connection from now on, the first one being 1.
    pub fn hold(&self, nth: usize) {
        self.count();
        self.held.store(nth, Ordering::SeqCst);
    }

    /// Waits for the held connection.
    pub fn wait(&self) {
        self.came.recv().unwrap();
    }

    /// Lets the held connection go on.
    pub fn go_on(&self) {
        self.go_on.send(()).unwrap();
    }
}

/// Copies both ways until one side ends.
fn pump(client: TcpStream, server: TcpStream) {
    let copy = |mut from: TcpStream, mut to: TcpStream| {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
    };
    let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
    std::thread::spawn(move || copy(from, to));
    copy(server, client);
}
