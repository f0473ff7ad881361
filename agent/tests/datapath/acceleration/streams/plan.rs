//! A connection: its ends, their options, and both its directions.

use super::way::{Random, Way, receive, send};
use crate::kit::Pod;
use socket2::SockRef;
use std::{
    net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream},
    thread,
};

/// Socket options of one end.
struct Options {
    nodelay: bool,
    sndbuf: Option<usize>,
    rcvbuf: Option<usize>,
}

impl Options {
    fn plan(random: &mut Random, least: usize) -> Self {
        let size = |random: &mut Random| {
            let size = least + random.magnitude(1 << 20);
            random.one_in(4).then_some(size)
        };
        Self {
            nodelay: random.one_in(2),
            sndbuf: size(random),
            rcvbuf: size(random),
        }
    }

    fn set(&self, socket: &TcpStream) {
        socket.set_nodelay(self.nodelay).unwrap();
        let socket = SockRef::from(socket);
        if let Some(size) = self.sndbuf {
            socket.set_send_buffer_size(size).unwrap();
        }
        if let Some(size) = self.rcvbuf {
            socket.set_recv_buffer_size(size).unwrap();
        }
    }
}

/// A connection with both its directions.
pub struct Plan {
    v6: bool,
    /// Which pod is the server.
    reversed: bool,
    pub ways: [Way; 2],
    options: [Options; 2],
}

impl Plan {
    pub fn new(random: &mut Random, least_buffer: usize) -> Self {
        let mut options = || Options::plan(random, least_buffer);
        let options = [options(), options()];
        Self {
            v6: random.one_in(2),
            reversed: random.one_in(2),
            ways: [Way::plan(random), Way::plan(random)],
            options,
        }
    }

    pub fn run(&self, a: &Pod, b: &Pod) {
        let (server, client) = if self.reversed { (a, b) } else { (b, a) };
        let at = match (a.ifindex == b.ifindex, self.v6) {
            (true, true) => Ipv6Addr::LOCALHOST.into(),
            (true, false) => Ipv4Addr::LOCALHOST.into(),
            (false, true) => server.v6,
            (false, false) => server.v4,
        };
        // A port of its own, of which nothing has been learnt.
        let listener = server.run(|| TcpListener::bind((at, 0)).unwrap());
        let address = listener.local_addr().unwrap();
        let client = client.run(|| TcpStream::connect(address).unwrap());
        self.options[0].set(&client);
        let (client, [there, back]) = (&client, &self.ways);
        thread::scope(|scope| {
            scope.spawn(|| send(client, there));
            // What is sent before anybody accepts must not get lost either.
            let server = &listener.accept().unwrap().0;
            self.options[1].set(server);
            thread::scope(|scope| {
                scope.spawn(|| receive(server, there));
                scope.spawn(|| send(server, back));
                scope.spawn(|| receive(client, back));
            });
        });
    }
}
