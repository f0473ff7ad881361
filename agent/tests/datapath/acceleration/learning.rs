//! Whose connections are enrolled is learnt from those before.

use super::{World, ask, enrolled, read_exact, unknown_port, with_timeout, world};
use crate::kit;
use sinabro_common::abi::acceleration::Skip;
use std::{
    io::Write,
    net::{IpAddr, TcpListener, TcpStream},
    thread,
};

/// A server in the second pod; the clients are in the first.
struct Server<'a> {
    w: &'a World,
    listener: TcpListener,
}

impl<'a> Server<'a> {
    fn new(w: &'a World, at: IpAddr) -> Self {
        let listener = w.b.run(|| TcpListener::bind((at, unknown_port())).unwrap());
        Self { w, listener }
    }

    fn connect(&self) -> (TcpStream, TcpStream) {
        let address = self.listener.local_addr().unwrap();
        let client = self.w.a.run(|| TcpStream::connect(address).unwrap());
        let (server, _) = self.listener.accept().unwrap();
        (with_timeout(client), with_timeout(server))
    }

    /// Why the next connection is not enrolled at either end; none if it is.
    fn skips(&self) -> Option<Skip> {
        let counters = [&self.w.a, &self.w.b].map(|pod| self.w.counters(pod));
        let _pair = self.connect();
        let mut all = [&self.w.a, &self.w.b]
            .into_iter()
            .zip(counters)
            .map(|(pod, before)| {
                let now = self.w.counters(pod);
                let mut reasons = Skip::ALL.into_iter();
                let more =
                    |&skip: &Skip| now.skipped[skip as usize] > before.skipped[skip as usize];
                let skip = reasons.find(more);
                let enrolled = now.enrolled - before.enrolled;
                assert_eq!(u64::from(skip.is_none()), enrolled);
                skip
            });
        let (client, server) = (all.next().unwrap(), all.next().unwrap());
        assert_eq!(client, server, "both ends judge alike");
        client
    }

    fn ask(&self, times: usize) {
        let (mut client, mut server) = self.connect();
        for _ in 0..times {
            ask(&mut client, &mut server);
        }
    }
}

/// One end sends so many messages of a size, the other only reads.
fn stream(mut from: TcpStream, mut to: TcpStream, message: usize, count: usize) -> [TcpStream; 2] {
    let sender = thread::spawn(move || {
        let message = vec![7; message];
        for _ in 0..count {
            from.write_all(&message).unwrap();
        }
        from
    });
    read_exact(&mut to, message * count);
    [sender.join().unwrap(), to]
}

#[test]
fn servers_that_stream_are_left_to_tcp() {
    world(true, true, |w| {
        for at in [w.b.v4, w.b.v6] {
            for (message, count) in [(65536, 100), (1, 20_000), (100, 20_000)] {
                for upload in [true, false] {
                    let server = Server::new(&w, at);
                    let (client, end) = server.connect();
                    assert!(!enrolled().is_empty(), "the first pays");
                    let _open = match upload {
                        true => stream(client, end, message, count),
                        false => stream(end, client, message, count),
                    };
                    // While it is open and when it has ended.
                    assert_eq!(server.skips(), Some(Skip::Stream), "{message} {upload}");
                    drop(_open);
                    assert_eq!(server.skips(), Some(Skip::Stream), "{message} {upload}");
                    // Another server is another.
                    assert_eq!(Server::new(&w, at).skips(), None);
                }
            }
        }
    });
}

#[test]
fn servers_that_answer_stay_accelerated() {
    world(true, true, |w| {
        let server = Server::new(&w, w.b.v4);
        for _ in 0..40 {
            server.ask(100);
        }
        assert_eq!(server.skips(), None);
        // Questions and answers of 64 kB.
        let (mut client, mut end) = server.connect();
        let body = vec![5; 65536];
        for _ in 0..100 {
            thread::scope(|scope| {
                scope.spawn(|| client.write_all(&body).unwrap());
                read_exact(&mut end, body.len());
            });
            thread::scope(|scope| {
                scope.spawn(|| end.write_all(&body).unwrap());
                read_exact(&mut client, body.len());
            });
        }
        assert_eq!(server.skips(), None);
    });
}

#[test]
fn servers_of_short_connections_are_left_to_tcp() {
    world(true, true, |w| {
        let server = Server::new(&w, w.b.v4);
        assert_eq!(server.skips(), None);
        for _ in 0..40 {
            server.ask(1);
        }
        assert_eq!(server.skips(), Some(Skip::Short));
        // Longer ones are seen though they go through TCP.
        for _ in 0..100 {
            server.ask(10);
        }
        assert_eq!(server.skips(), None);
    });
}

#[test]
fn who_only_looks_whether_a_server_is_there_spoils_it_for_nobody() {
    world(true, true, |w| {
        let server = Server::new(&w, w.b.v4);
        for _ in 0..40 {
            drop(server.connect());
            server.ask(100);
        }
        assert_eq!(server.skips(), None);
        // Also while those that last have not ended.
        let server = Server::new(&w, w.b.v4);
        let lasting = [server.connect(), server.connect()];
        let lasting = lasting.map(|(mut client, mut end)| {
            (0..100).for_each(|_| ask(&mut client, &mut end));
            (client, end)
        });
        for _ in 0..20 {
            drop(server.connect());
        }
        kit::eventually("the end", || enrolled().len() == 2 * lasting.len());
        assert_eq!(server.skips(), None);
    });
}

#[test]
fn a_server_that_changes_is_learnt_anew() {
    world(true, true, |w| {
        for (message, count) in [(65536, 200), (1, 400_000)] {
            let server = Server::new(&w, w.b.v4);
            let (client, end) = server.connect();
            drop(stream(client, end, message, count));
            assert_eq!(server.skips(), Some(Skip::Stream));
            // And keeps to it while what goes through TCP is as before.
            let (client, end) = server.connect();
            drop(stream(client, end, message, count));
            assert_eq!(server.skips(), Some(Skip::Stream));
            for _ in 0..50 {
                server.ask(100);
            }
            assert_eq!(server.skips(), None, "{message}");
        }
    });
}

#[test]
fn what_was_learnt_outlives_the_agent() {
    world(true, true, |mut w| {
        let listener = {
            let server = Server::new(&w, w.b.v4);
            let (client, end) = server.connect();
            drop(stream(client, end, 65536, 100));
            server.listener
        };
        w.start(true);
        let server = Server { w: &w, listener };
        assert_eq!(server.skips(), Some(Skip::Stream));
        assert_eq!(Server::new(&w, w.b.v4).skips(), None);
    });
}
