//! Packets in parts, whose ports the first alone names.
//!
//! What pods send in parts has the node's address in whatever order it leaves. Of an answer, parts that come before the
//! first are left alone, and wait: behind the one before it each comes in once more.

use super::*;
use crate::run::REDIRECT;
use std::time::{Duration, Instant};

/// After a packet's last part the others are waited for no longer than a second.
const SOON: Duration = Duration::from_millis(500);

/// An answer that comes in parts.
struct Answer {
    key: Key,
    making: Making,
    /// Its parts, outside and as they are given.
    sent: Vec<Ip>,
    given: Vec<Ip>,
    /// The first part was here,
    whose: Option<Whose>,
    /// these came before it,
    early: BTreeSet<usize>,
    /// and the last one behind it.
    ended: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Whose {
    /// Of a flow that has a record.
    Known,
    /// Of nobody's but the node's own.
    Nobodys,
}

impl Model<'_> {
    fn next_id(&mut self) -> u32 {
        self.id += 1;
        self.id
    }

    pub fn out_in_parts(
        &mut self,
        key: Key,
        flags: u8,
        order: &Order,
    ) -> Result<(), TestCaseError> {
        let (proto, own, port, far, far_port) = key;
        let whole = Making::request(proto, flags);
        let making = whole.in_parts(self.next_id());
        if making.keeps_port() {
            // Which port it has, no part would say.
            self.out(key, whole)?;
            if self.record(&key).is_none() {
                return Ok(());
            }
        }
        let parts = making.parts((own, port), (far, far_port));
        prop_assert_eq!(parts.len(), PARTS);
        let node = Self::node(own.is_ipv6());
        let mut noted = None;
        for part in order {
            if *part == 0 {
                noted = self.out(key, making)?;
                continue;
            }
            let ip = &parts[*part];
            let got = match Self::is_of_node(&key) {
                true => self.w.host_out(ip),
                false => self.w.out(ip),
            };
            let expected = Ip {
                src: noted.unwrap_or(node),
                ..ip.clone()
            };
            prop_assert_eq!(got, (PASS, World::frame(&expected)), "part {}", part);
        }
        Ok(())
    }

    pub fn answers_in_parts(
        &mut self,
        at: [usize; 2],
        flags: u8,
        order: &Order,
    ) -> Result<(), TestCaseError> {
        let mut answers = Vec::new();
        for at in at {
            let Some(key) = self.some(at) else {
                return Ok(());
            };
            let Some(outside) = self.answered(&key) else {
                return Ok(());
            };
            let (proto, own, port, far, far_port) = key;
            let making = Making::answer(proto, flags).in_parts(self.next_id());
            let (from, node) = ((far, far_port), Self::node(own.is_ipv6()));
            answers.push(Answer {
                key,
                making,
                sent: making.parts(from, (node, outside)),
                given: making.parts(from, (own, port)),
                whose: None,
                early: BTreeSet::new(),
                ended: None,
            });
        }
        for number in order {
            self.part_comes(&mut answers[number / PARTS], number % PARTS)?;
        }
        Ok(())
    }

    fn part_comes(&mut self, answer: &mut Answer, part: usize) -> Result<(), TestCaseError> {
        if answer.ended.is_some_and(|ended| ended.elapsed() > SOON) {
            // The machine was busy.
            return Ok(());
        }
        let got = self.w.come(&answer.sent[part]);
        let untouched = |part: usize| World::frame(&answer.sent[part]);
        if part == 0 {
            let has_record = self.record(&answer.key).is_some();
            self.notes_answer(&answer.key, answer.making.flags);
            if !has_record {
                answer.whose = Some(Whose::Nobodys);
                prop_assert_eq!(got, (PASS, untouched(0)));
                return Ok(());
            }
            answer.whose = Some(Whose::Known);
            if answer.making.keeps_port() && self.answered(&answer.key) != Some(answer.key.2) {
                prop_assert_eq!(got.0, DROP);
                return Ok(());
            }
        }
        if answer.whose != Some(Whose::Known) {
            if answer.whose.is_none() {
                answer.early.insert(part);
            }
            prop_assert_eq!(got, (PASS, untouched(part)), "part {}", part);
            return Ok(());
        }
        if part + 1 == PARTS {
            answer.ended = Some(Instant::now());
        }
        let given = World::frame(&answer.given[part]);
        let next = part + 1;
        if !answer.early.remove(&next) {
            prop_assert_eq!(got, (PASS, given), "part {}", part);
            return Ok(());
        }
        // What is left is the next one, behind a copy of this one. That is not seen, but the same once more is.
        prop_assert_eq!(got, (REDIRECT, untouched(next)), "behind part {}", part);
        self.seen.waited += 1;
        let again = self.w.come(&answer.sent[part]);
        prop_assert_eq!(again, (PASS, given), "part {}", part);
        self.part_comes(answer, next)
    }

    /// Outside nobody knows the connection under another address.
    pub fn come_back(&mut self, end: End, order: &Order) -> Result<(), TestCaseError> {
        let (proto, pod, port, far, far_port) = self.key(end.of_server());
        self.come(end)?;
        for flags in [SYN | ACK, ACK] {
            let packet = Making::answer(proto, flags).first((pod, port), (far, far_port));
            prop_assert_eq!(self.w.out(&packet), (PASS, World::frame(&packet)));
        }
        let making = Making::answer(proto, ACK).in_parts(self.next_id());
        let parts = making.parts((pod, port), (far, far_port));
        // As its stack sends them: of one before the first nobody knows that it is not masqueraded.
        let later = order.iter().filter(|part| **part != 0);
        for part in std::iter::once(&0).chain(later) {
            let unchanged = World::frame(&parts[*part]);
            prop_assert_eq!(
                self.w.out(&parts[*part]),
                (PASS, unchanged),
                "part {}",
                part
            );
        }
        Ok(())
    }
}
