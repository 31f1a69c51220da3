//! Traces that nobody who means well would write, a great many of them.
//!
//! A file is read or refused, without a panic; memory grows with the bytes that are there and not with
//! what they claim; and of what is read, everything holds that the reader of a routing relies on.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::path::Path;

use graph_ep_cli::demand::required_rows;
use graph_ep_cli::routing::{MAX_EXPERTS, Routing};
use graph_ep_cli::trace::{self, TraceError};

thread_local! {
    /// Bytes that the thread has allocated and not freed, and the most of them since it was asked.
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

/// The system's allocator, which counts for each thread.
struct Counting;

fn count(bytes: isize) {
    // Failing only while the thread is torn down, when nobody asks any more.
    let _ = HELD.try_with(|held| {
        let (now, most) = held.get();
        held.set((now + bytes, most.max(now + bytes)));
    });
}

// SAFETY: every call is the system allocator's, with the arguments of the caller, who keeps its contract;
// counting neither allocates nor panics. `realloc` is the default one, made of these two and a copy.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise; all memory comes from the same allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What `work` gives, and the most bytes that it held at one time.
fn measured<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.with(|held| {
        let (now, _) = held.get();
        held.set((now, now));
        now
    });
    let result = work();
    let most = HELD.with(Cell::get).1;
    (result, usize::try_from(most - before).expect("it counts from there"))
}

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

    fn of<'a, T: ?Sized>(&mut self, choices: &[&'a T]) -> &'a T {
        choices[self.below(choices.len())]
    }
}

/// A trace of the corpus. The first word of its name says how it is answered.
struct Seed {
    name: String,
    bytes: Vec<u8>,
}

impl Seed {
    /// The header and what follows it, wherever that is; a file too short for both has neither.
    fn parts(&self) -> (&[u8], &[u8]) {
        let Some((length, rest)) = self.bytes.split_first_chunk::<8>() else { return (&[], &[]) };
        let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
        rest.split_at(length.min(rest.len()))
    }
}

fn corpus() -> Vec<Seed> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/trace");
    let mut seeds: Vec<Seed> = fs::read_dir(folder)
        .expect("the corpus")
        .map(|entry| {
            let path = entry.expect("an entry").path();
            let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
            Seed { name, bytes: fs::read(path).expect("a seed") }
        })
        .collect();
    seeds.sort_by(|one, other| one.name.cmp(&other.name));
    seeds
}

fn read(bytes: &[u8]) -> Result<Routing, TraceError> {
    trace::read(bytes, "name".into(), "file".into())
}

/// The word by which the corpus knows an answer.
fn kind(answer: &Result<Routing, TraceError>) -> &'static str {
    match answer {
        Ok(_) => "valid",
        Err(TraceError::NotSafetensors { .. }) => "container",
        Err(TraceError::Truncated { .. }) => "truncated",
        Err(TraceError::NoIds { .. }) => "ids",
        Err(TraceError::ElementType { .. }) => "type",
        Err(TraceError::Shape { .. }) => "shape",
        Err(TraceError::NoExperts { .. } | TraceError::Experts { .. }) => "experts",
        Err(TraceError::Routing { .. }) => "routing",
        Err(_) => "unknown",
    }
}

/// What may be held while a file of so many bytes is read: the header, its parts and the ids are some
/// multiples of it, and checking ids takes a word an expert.
fn bound(bytes: usize) -> usize {
    64 * bytes + size_of::<usize>() * MAX_EXPERTS + (64 << 10)
}

/// Everything that the module of routings promises.
fn check(routing: &Routing) {
    let (experts, top_k) = (routing.experts(), routing.top_k());
    let sizes = [experts, top_k, routing.steps(), routing.layers(), routing.tokens()];
    assert!(sizes.iter().all(|size| *size > 0) && experts <= MAX_EXPERTS, "{sizes:?}");
    for step in 0..routing.steps() {
        for layer in 0..routing.layers() {
            let layer = routing.layer(step, layer);
            assert_eq!(layer.ids.len(), routing.tokens() * top_k);
            for token in layer.ids.chunks_exact(top_k) {
                let mut chosen: Vec<i32> = token.iter().copied().filter(|id| *id != -1).collect();
                assert!(chosen.iter().all(|id| (0..experts as i32).contains(id)), "{token:?}");
                chosen.sort_unstable();
                assert!(chosen.is_sorted_by(|one, next| one < next), "{token:?}");
            }
            if let Some(weights) = layer.weights {
                assert_eq!(weights.len(), layer.ids.len());
                assert!(weights.iter().all(|weight| weight.is_finite()), "{weights:?}");
            }
        }
    }
    // What comes next in the program takes it as it is.
    let ranks = experts.min(8);
    let shards = routing.shards(ranks).expect("every rank has an expert");
    let owned: usize = (0..ranks).map(|rank| shards.range(0, rank).len()).sum();
    assert_eq!(owned, routing.tokens());
    assert_eq!(required_rows(routing, ranks, 16).len(), routing.steps());
}

/// Makes of the seeds a file that looks like one of them.
fn mutate(file: &mut Vec<u8>, seeds: &[Seed], random: &mut Random) {
    // The sound ones, which are the last, are the furthest that a reader can be led astray.
    let sound = seeds.partition_point(|seed| !seed.name.starts_with("valid"));
    let first = if random.below(2) == 0 { sound } else { 0 };
    let (header, data) = seeds[first + random.below(seeds.len() - first)].parts();
    let (mut header, mut data) = (header.to_vec(), data.to_vec());
    for _ in 0..=random.below(2) {
        match random.below(6) {
            0..3 => scramble(&mut data, seeds, random),
            3 => scramble(&mut header, seeds, random),
            _ => rewrite(&mut header, random),
        }
    }
    let length = match random.below(12) {
        0 => random.next() >> random.below(64),
        1 => header.len() as u64 + 1,
        _ => header.len() as u64,
    };
    file.clear();
    file.extend(length.to_le_bytes());
    file.append(&mut header);
    file.append(&mut data);
    if random.below(16) == 0 {
        file.truncate(random.below(file.len()));
    }
}

/// Changes bytes, without regard for what they mean.
fn scramble(bytes: &mut Vec<u8>, seeds: &[Seed], random: &mut Random) {
    let place = random.below(bytes.len());
    match random.below(6) {
        0 if !bytes.is_empty() => bytes[place] = (random.next() >> 32) as u8,
        1 if !bytes.is_empty() => bytes[place] ^= 1 << random.below(8),
        2 if !bytes.is_empty() => drop(bytes.remove(place)),
        3 => bytes.truncate(place),
        4 => {
            let other = &seeds[random.below(seeds.len())].bytes;
            bytes.truncate(place);
            bytes.extend_from_slice(&other[random.below(other.len())..]);
        }
        _ => bytes.insert(place, (random.next() >> 32) as u8),
    }
}

/// Puts another number or word in place of one in the header, so that it still is JSON.
fn rewrite(header: &mut Vec<u8>, random: &mut Random) {
    let class = |byte: u8| match byte {
        b'0'..=b'9' => 1,
        b'a'..=b'z' | b'A'..=b'Z' | b'_' => 2,
        _ => 0,
    };
    let mut tokens = Vec::new();
    let mut start = 0;
    while start < header.len() {
        let kind = class(header[start]);
        let run = header[start..].iter().take_while(|byte| class(**byte) == kind).count();
        if kind > 0 {
            tokens.push((start..start + run, kind));
        }
        start += run;
    }
    if tokens.is_empty() {
        return;
    }
    let (range, kind) = tokens.swap_remove(random.below(tokens.len()));
    let numbers = [
        "0",
        "1",
        "2",
        "3",
        "4",
        "7",
        "8",
        "16",
        "32",
        "-1",
        "1e3",
        "65536",
        "65537",
        "4294967296",
        "1099511627776",
        "9223372036854775807",
        "18446744073709551615",
        "18446744073709551616",
    ];
    let words = [
        "U8",
        "U16",
        "I32",
        "I64",
        "F32",
        "BF16",
        "F8_E4M3",
        "F4",
        "BOOL",
        "topk_idx",
        "topk_weights",
        "step",
        "domain",
        "experts",
        "__metadata__",
        "shape",
        "dtype",
        "data_offsets",
    ];
    let new = if kind == 1 { random.of(&numbers) } else { random.of(&words) };
    header.splice(range, new.bytes());
}

#[test]
fn seeds_are_answered_as_they_are_called() {
    let seeds = corpus();
    assert!(seeds.len() >= 40, "{} seeds", seeds.len());
    for seed in &seeds {
        let (answer, held) = measured(|| read(&seed.bytes));
        assert_eq!(seed.name.split('-').next(), Some(kind(&answer)), "{}: {answer:?}", seed.name);
        assert!(held <= bound(seed.bytes.len()), "{}: {held} bytes were held", seed.name);
        if let Ok(routing) = answer {
            check(&routing);
        }
    }
}

#[test]
fn hostile_traces_are_read_or_refused() {
    let seeds = corpus();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut file = Vec::new();
    let mut answers = BTreeMap::<_, usize>::new();
    for _ in 0..200_000 {
        mutate(&mut file, &seeds, &mut random);
        let (answer, held) = measured(|| read(&file));
        assert!(held <= bound(file.len()), "{held} bytes were held for {}", file.escape_ascii());
        *answers.entry(kind(&answer)).or_default() += 1;
        if let Ok(routing) = answer {
            check(&routing);
        }
    }
    // Else the mutations would be too wild to get past the first look, or too tame.
    for expected in
        ["valid", "container", "truncated", "ids", "type", "shape", "experts", "routing"]
    {
        assert!(answers.get(expected).is_some_and(|many| *many >= 300), "{answers:?}");
    }
    assert!(!answers.contains_key("unknown"), "{answers:?}");
}

/// A file that does not end, and counts what is read of it.
struct Endless<'a> {
    bytes: &'a [u8],
    read: usize,
}

impl Read for Endless<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let rest = self.bytes.get(self.read..).unwrap_or_default();
        let copied = rest.len().min(into.len());
        into[..copied].copy_from_slice(&rest[..copied]);
        into[copied..].fill(0);
        self.read += into.len();
        Ok(into.len())
    }
}

#[test]
fn no_more_is_read_than_the_header_promises() {
    for seed in corpus().iter().filter(|seed| seed.name.starts_with("valid")) {
        let mut endless = Endless { bytes: &seed.bytes, read: 0 };
        let answer = trace::read(&mut endless, "name".into(), "file".into());
        assert_eq!(kind(&answer), "container", "{}: bytes follow", seed.name);
        // One byte more, to see whether there is one.
        assert_eq!(endless.read, seed.bytes.len() + 1, "{}", seed.name);
    }
}
