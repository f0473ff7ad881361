//! ICMP errors about packets of Services, as in [`crate::nat::error`]: what they quote is what went between client and
//! endpoint, and the client knows only the frontend.

use super::{NONE, TRANSLATED, arrive};
use crate::{
    connection,
    maps::ALIASES,
    nat::{
        drop,
        error::{outer, quoted, read},
    },
    rewrite::{End, Failed},
    scratch::{self, Scratch, verified_once},
};
use aya_ebpf::bindings::__sk_buff;
use sinabro_common::abi::{Addr, drop::DropReason};

verified_once! {
    /// What a client says of a packet that it got from a frontend: that was the endpoint's.
    pub fn leave = leave_global(left);
}

#[inline(always)]
fn left(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    if !read(skb, scratch)
        || scratch.quoted.src != scratch.ip.dst
        || scratch.quoted.dst != scratch.ip.src
    {
        return NONE;
    }
    scratch.identify_quoted();
    scratch.tuple.write_reversed(&mut scratch.alias_key);
    let Some(alias) = ALIASES.get_ptr(&scratch.alias_key) else {
        return NONE;
    };
    // SAFETY: a value that the map just gave.
    unsafe {
        scratch.alias.addr = Addr::at(&raw const (*alias).addr);
        scratch.alias.port = (*alias).port;
    }
    match quoted(skb, scratch, End::Source).and_then(|()| outer(skb, scratch, End::Destination)) {
        Ok(()) => {
            scratch.ip.dst = scratch.alias.addr;
            TRANSLATED
        }
        Err(Failed) => drop(DropReason::RewriteFailed),
    }
}

verified_once! {
    /// What somebody says of a packet that a client sent to a frontend. If it is the endpoint the frontend says it;
    /// a router on the way has a name of its own.
    pub fn arrive = arrive_global(arrived);
}

#[inline(always)]
fn arrived(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    if !read(skb, scratch) || scratch.quoted.src != scratch.ip.dst {
        return NONE;
    }
    scratch.identify_quoted();
    let Some(found) = connection::find(&scratch.key) else {
        return NONE;
    };
    // SAFETY: a value that the map just gave.
    unsafe {
        // What is quoted goes the other way than an answer.
        if !arrive::is_answer(found, !scratch.from_high) {
            return NONE;
        }
        arrive::show_frontend(found, scratch);
    }
    let is_of_endpoint = scratch.ip.src == scratch.quoted.dst;
    let quoted = quoted(skb, scratch, End::Destination);
    let result = match is_of_endpoint {
        true => quoted.and_then(|()| outer(skb, scratch, End::Source)),
        false => quoted,
    };
    match result {
        Ok(()) => TRANSLATED,
        Err(Failed) => drop(DropReason::RewriteFailed),
    }
}
