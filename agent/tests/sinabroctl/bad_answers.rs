//! An agent that is not there, says nothing, refuses, or speaks of something else.

use crate::kit::{Agent, ctl, text};
use proptest::prelude::*;
use sinabro_common::api::{frame, *};
use sinabro_lab::traffic::close::close;
use std::{
    io::{Read, Write},
    os::unix::net::UnixListener,
    thread,
};

#[test]
fn no_agent_is_exit_code_3_with_the_socket_and_a_next_step() {
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("absent.sock");
    let stale = dir.path().join("stale.sock");
    close(UnixListener::bind(&stale).unwrap()).unwrap();
    for (socket, hint) in [(absent, "is the agent running"), (stale, "has stopped")] {
        let output = ctl(&socket, &["status"]);
        assert_eq!(output.status.code(), Some(3));
        let text = text(&output.stderr);
        assert!(
            text.contains(socket.to_str().unwrap()) && text.contains(hint),
            "{text}"
        );
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn a_silent_agent_is_given_up_on() {
    let agent = Agent::new(|mut stream| {
        // Until the other side is gone.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let output = agent.run(&["--timeout", "1", "status"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(text(&output.stderr).contains("did not answer within 1 s"));
}

#[test]
fn a_dripping_agent_is_given_up_on() {
    let agent = Agent::new(|mut stream| {
        let mut bytes = 1000u32
            .to_be_bytes()
            .into_iter()
            .chain(std::iter::repeat(b' '));
        while stream.write_all(&[bytes.next().unwrap()]).is_ok() {
            thread::sleep(std::time::Duration::from_millis(100));
        }
    });
    let output = agent.run(&["--timeout", "1", "status"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(text(&output.stderr).contains("did not answer within 1 s"));
}

#[test]
fn refusals_name_their_reason() {
    let refusal = |code| Reply::Error(ApiError::new(code, "starting: restoring endpoints"));
    for (code, exit) in [
        (ErrorCode::NotReady, 1),
        (ErrorCode::Internal, 1),
        (ErrorCode::Version, 3),
    ] {
        let output = Agent::replying(Request::Ipam, VERSION, refusal(code)).run(&["ipam"]);
        assert_eq!(output.status.code(), Some(exit));
        assert!(text(&output.stderr).contains("starting: restoring endpoints"));
    }
}

#[test]
fn wrong_answers_are_errors() {
    let other = Agent::replying(Request::Ipam, VERSION, Reply::Ok(Response::Done)).run(&["ipam"]);
    let newer = Agent::replying(Request::Ipam, 9, Reply::Ok(Response::Done)).run(&["ipam"]);
    let closed = Agent::new(drop).run(&["ipam"]);
    for (output, part) in [
        (other, "another question"),
        (newer, "version 9"),
        (closed, "no usable answer"),
    ] {
        assert_eq!(output.status.code(), Some(3));
        assert!(
            text(&output.stderr).contains(part),
            "{}",
            text(&output.stderr)
        );
        assert!(output.stdout.is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn garbage_is_an_error_not_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64), framed: bool) {
        let agent = Agent::new(move |mut stream| {
            let _: RequestEnvelope = frame::read(&mut stream).unwrap();
            if framed {
                let _ = stream.write_all(&(bytes.len() as u32).to_be_bytes());
            }
            let _ = stream.write_all(&bytes);
        });
        let output = agent.run(&["nodes"]);
        prop_assert_eq!(output.status.code(), Some(3));
        prop_assert!(text(&output.stderr).starts_with("sinabroctl: no usable answer"));
    }
}
