//! Messages that nobody who means well would send, a great many of them.

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::super::compare::Fields;
use super::super::exchange::Contribution;
use super::failure::Failure;
use super::link::Received;
use super::pending::{Gate, Pending, Progress};
use super::proof::Token;
use super::wire::{Greeting, Hello, Joining, PREFIX, Preface, ToHub, ToRank, decode, frame};

/// Random, and the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

/// Messages of all kinds, each in a file of its own.
fn corpus() -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/rendezvous");
    let mut seeds: Vec<(String, Vec<u8>)> = fs::read_dir(folder)
        .expect("the corpus")
        .map(|entry| {
            let path = entry.expect("an entry").path();
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            (name, fs::read(path).expect("a seed"))
        })
        .collect();
    seeds.sort();
    seeds
}

/// Makes `message` something that looks like one of `seeds`.
fn mutate(message: &mut Vec<u8>, seeds: &[(String, Vec<u8>)], random: &mut Random) {
    message.clear();
    message.extend_from_slice(&seeds[random.below(seeds.len())].1);
    for _ in 0..=random.below(4) {
        let place = random.below(message.len());
        match random.below(8) {
            0 if !message.is_empty() => message[place] = (random.next() >> 32) as u8,
            1 if !message.is_empty() => message[place] ^= 1 << random.below(8),
            2 => message.truncate(place),
            3 => message.insert(place, (random.next() >> 32) as u8),
            // The largest lengths and numbers.
            4 if message.len() >= 4 => {
                let place = place.min(message.len() - 4);
                message[place..place + 4].copy_from_slice(&[255; 4]);
            }
            5 if !message.is_empty() => drop(message.remove(place)),
            6 => {
                let other = &seeds[random.below(seeds.len())].1;
                message.truncate(place);
                message.extend_from_slice(&other[random.below(other.len())..]);
            }
            _ => message.push((random.next() >> 32) as u8),
        }
    }
}

/// Whatever is read from `message` can be written and read again: it is not more than it seems.
fn read<'a, T: Deserialize<'a> + Serialize>(message: &'a [u8]) -> bool {
    let Ok(value) = decode::<T>(message) else { return false };
    let frame = frame(&value).expect("what was read is short");
    // Numbers have longer forms than the one we write.
    assert!(frame.len() - PREFIX <= message.len());
    true
}

#[test]
fn seeds_are_what_they_are_called() {
    let seeds = corpus();
    assert!(seeds.len() >= 12, "{} seeds", seeds.len());
    for (name, seed) in &seeds {
        let kinds = [
            ("hello", read::<Hello<'_>>(seed)),
            ("greeting", read::<Greeting>(seed)),
            ("joining", read::<Joining>(seed)),
            ("hub", read::<ToHub<'_>>(seed)),
            ("rank", read::<ToRank<'_>>(seed)),
            ("fields", decode::<Fields<'_>>(seed).is_ok()),
            ("exchange", decode::<Contribution<'_>>(seed).is_ok()),
        ];
        let kind = name.split('-').next().expect("a kind");
        assert!(kind == "foreign" || kinds.contains(&(kind, true)), "{name}");
        assert_eq!(Preface::check(seed).is_ok(), matches!(kind, "hello" | "greeting"), "{name}");
    }
}

#[test]
fn a_million_hostile_messages_are_read_or_refused() {
    let seeds = corpus();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut message = Vec::new();
    let mut readable = 0;
    for _ in 0..1_000_000 {
        mutate(&mut message, &seeds, &mut random);
        let read = [
            Preface::check(&message).is_ok() && read::<Hello<'_>>(&message),
            read::<ToHub<'_>>(&message),
            read::<ToRank<'_>>(&message),
            decode::<Joining>(&message).is_ok(),
            decode::<Fields<'_>>(&message).is_ok(),
            decode::<Contribution<'_>>(&message).is_ok(),
        ];
        readable += usize::from(read.contains(&true));
    }
    // Else the mutations would be too wild to get past the first look.
    assert!(readable > 10_000, "{readable} could be read");
}

#[test]
fn hostile_streams_do_not_join_and_do_not_stay() {
    let seeds = corpus();
    let gate = Gate { group: "job".to_owned(), token: Token::new("secret") };
    let mut random = Random(0xdead_beef);
    let mut message = Vec::new();
    for _ in 0..20_000 {
        let (mut near, far) = UnixStream::pair().expect("a pair");
        let mut pending = Pending::new(far.into());
        let mut over = false;
        for _ in 0..3 {
            mutate(&mut message, &seeds, &mut random);
            // The length may lie as well.
            let length =
                if random.below(8) == 0 { random.next() as u32 } else { message.len() as u32 };
            let _ = near.write_all(&[&length.to_le_bytes()[..], &message].concat());
            match pending.advance(&gate) {
                Progress::Waits => {}
                Progress::Joins(claim) => panic!("{claim:?} has joined without the token"),
                Progress::Over(_) => over = true,
            }
        }
        drop(near);
        assert!(over || matches!(pending.advance(&gate), Progress::Over(_)), "it stays");
    }
}

#[test]
fn a_refused_rank_is_told_and_then_not_heard() {
    let (near, far) = UnixStream::pair().expect("a pair");
    let mut pending = Pending::new(far.into());
    pending.refuse(Failure::Duplicate { rank: 3 });
    (&near).write_all(&frame(&"more").expect("framed")).expect("written");
    let gate = Gate { group: String::new(), token: None };
    assert_eq!(pending.advance(&gate), Progress::Waits);
    let mut link = super::link::Link::new(near.into());
    assert_eq!(link.receive(), Received::End);
    let message = link.inbox.message(1000).expect("short").expect("whole");
    assert_eq!(decode(message), Ok(ToRank::Failed(Failure::Duplicate { rank: 3 })));
}
