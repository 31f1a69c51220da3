//! Ranks that are processes: they meet over TCP, share memory, and are told who failed.
//!
//! A test starts this program again for each rank, with a part to play in its environment. A rank
//! says on a line of its output how far it has come, and goes on when it reads a line.

use std::env;
use std::fs;
use std::io::{self, BufRead, BufReader, Lines, Write};
use std::process::{self, Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use ep_context::backend::{Backend, Memory};
use ep_context::fault::Phase;
use ep_context::rendezvous::{Environment, Rendezvous, TcpRendezvous};
use ep_context::signal::params::{AttentionBlock, ControlBlock, WaitParams};
use ep_context::signal::{HostControl, HostWaiter};
use ep_context::{Deadlines, HostBackend, MemoryAccount, Rank, SymmetricBlock};
use rustix::process::{Pid, Signal, kill_process};

const LONG: Duration = Duration::from_secs(120);

/// Long enough for processes to come, short enough to wait for one that will not.
const SHORT: Duration = Duration::from_secs(4);

const PART: &str = "GRAPH_EP_TEST_PART";

/// A rank that runs. It is killed and waited for if the test ends before it does.
struct Process {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

/// Starts those `ranks` of a group of `world` that play `part`.
fn start(part: &str, world: usize, ranks: impl IntoIterator<Item = usize>) -> Vec<Process> {
    static PLACES: AtomicU32 = AtomicU32::new(0);
    let place = PLACES.fetch_add(1, Relaxed);
    // The name keeps the group apart from others that happen to choose the same ports.
    let name = format!("{}-{place}", process::id());
    let port = 12_000 + (process::id() * 16 + place) % 400 * 17;
    let start = |rank: usize| {
        let mut child = Command::new(env::current_exe().expect("this program"))
            .args(["--exact", "rank", "--nocapture", "--test-threads=1"])
            .env(PART, part)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", world.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("TORCHELASTIC_USE_AGENT_STORE", "True")
            .env("TORCHELASTIC_RUN_ID", &name)
            .env("GRAPH_EP_JOB_TOKEN", format!("secret of {name}"))
            .env_remove("GRAPH_EP_PORT")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let stdin = child.stdin.take().expect("piped");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        Process { child, stdin, lines }
    };
    ranks.into_iter().map(start).collect()
}

impl Process {
    /// What it says next, or the end of what it says.
    fn says(&mut self) -> Option<String> {
        loop {
            // The test harness, which it runs in, says other things, and may not end its line.
            let line = self.lines.next()?.expect("text");
            if let Some((_, said)) = line.split_once("rank says: ") {
                return Some(said.to_owned());
            }
        }
    }

    fn expect(&mut self, text: &str) {
        assert_eq!(self.says().as_deref(), Some(text));
    }

    fn read(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").expect("it reads");
    }

    fn go_on(&mut self) {
        self.read("");
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it runs");
    }

    fn ends(mut self) -> ExitStatus {
        assert_eq!(self.says(), None, "it has ended");
        self.child.wait().expect("a child")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // An error is a process that has been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(text: &str) {
    let mut out = io::stdout().lock();
    writeln!(out, "rank says: {text}").and_then(|()| out.flush()).expect("heard");
}

/// Waits for a line; one that never comes is the end of the test, and so of this process.
fn line() -> String {
    let mut line = String::new();
    if io::stdin().read_line(&mut line).expect("readable") == 0 {
        process::exit(3);
    }
    line
}

/// The body of every rank; nothing if this is not the process of one.
#[test]
fn rank() {
    let Ok(part) = env::var(PART) else { return };
    let environment = Environment::from_environment().expect("the variables are set");
    let meet = |deadline| TcpRendezvous::meet(&environment.tcp, deadline);
    match part.as_str() {
        "share" => {
            let before = held();
            share(&meet(LONG).expect("all meet"));
            assert_eq!(held(), before, "something is left behind");
            say("shared");
        }
        "meet" => match meet(SHORT) {
            Ok(_) => say("met"),
            Err(error) => say(&error.to_string()),
        },
        "gather" => {
            say("started");
            line();
            let group = match meet(LONG) {
                Ok(group) => group,
                Err(error) => return say(&error.to_string()),
            };
            say("met");
            let seconds = line().trim().parse().expect("seconds");
            match group.barrier("growing", Duration::from_secs(seconds)) {
                Ok(()) => say("gathered"),
                Err(error) => say(&error.to_string()),
            }
            // Nobody leaves before all have been told.
            line();
        }
        other => panic!("there is no part {other}"),
    }
}

/// What this process has open: its descriptors, threads, and mappings of shared memory.
fn held() -> (usize, usize, usize) {
    let count = |folder| fs::read_dir(folder).expect("a folder").count();
    let maps = fs::read_to_string("/proc/self/maps").expect("readable");
    let shared = maps.lines().filter(|line| line.contains("memfd:")).count();
    (count("/proc/self/fd"), count("/proc/self/task"), shared)
}

fn word(address: u64) -> &'static AtomicU64 {
    let address = std::ptr::with_exposed_provenance_mut(address as usize);
    // SAFETY: `share` asks for words of mapped blocks only, which all ranks access as atomics, and
    // drops the references before the blocks.
    unsafe { AtomicU64::from_ptr(address) }
}

/// Every rank writes into the memory of every other, signals it, and waits for all signals.
fn share(group: &dyn Rendezvous) {
    let (rank, world) = (group.rank(), group.world());
    let backend = HostBackend::default();
    let account = MemoryAccount::new(None);
    let allocate = |label, bytes| {
        SymmetricBlock::allocate(&backend, group, label, bytes, &account, LONG).expect("a block")
    };
    let attention = allocate("attention", size_of::<AttentionBlock>());
    let values = allocate("values", world * size_of::<u64>());
    let epochs = allocate("epochs", world * size_of::<u32>());
    let control = backend.allocate(size_of::<ControlBlock>()).expect("memory");
    let table = backend.allocate(world * size_of::<u64>()).expect("memory");
    for (peer, address) in (0u64..).zip(attention.addresses()) {
        word(table.address() + 8 * peer).store(*address, Relaxed);
    }
    // SAFETY: The block is mapped and aligned until the end of this function, behind the view, and
    // only atomic operations reach it.
    let host = unsafe { HostControl::from_address(control.address()) };
    host.set_deadlines(&Deadlines::all(LONG));
    group.barrier("ready to signal", LONG).expect("all come");

    let params = WaitParams {
        control: control.address(),
        attention: table.address(),
        own: attention.addresses()[rank.index()],
        rank: rank.0,
        world: u32::try_from(world).expect("few ranks"),
    };
    // SAFETY: Control, table and the attention blocks of all ranks are mapped and aligned until the
    // end of this function, which is behind a barrier that all ranks reach when they have stopped
    // waiting; the table is not written any more, all else is accessed by atomics only; the rank is
    // one of the group.
    let waiter = unsafe { HostWaiter::from_params(&params) };
    for epoch in 1..=100u32 {
        for (peer, (value, signal)) in values.addresses().iter().zip(epochs.addresses()).enumerate()
        {
            word(value + 8 * u64::from(rank.0))
                .store(u64::from(epoch) * 1000 + peer as u64, Relaxed);
            // SAFETY: The word lies in the block of epochs, which has one for each rank, aligned
            // and accessed by signals and waits only.
            unsafe { waiter.signal(Rank::from_index(peer), signal + 4 * u64::from(rank.0), epoch) };
        }
        // SAFETY: The block holds a word of every rank, as for the signals.
        let waited = unsafe { waiter.wait_all(Phase::Dispatch, epochs.own_address(), epoch) };
        waited.expect("all signal");
        for peer in 0..world as u64 {
            let value = word(values.own_address() + 8 * peer).load(Relaxed);
            assert_eq!(value, u64::from(epoch) * 1000 + u64::from(rank.0), "from rank {peer}");
        }
        // Nobody overwrites what a slower rank has still to read.
        group.barrier("all have read", LONG).expect("all come");
    }
}

#[test]
fn processes_share_memory_and_leave_nothing_behind() {
    for world in [1, 3, 4] {
        let mut ranks = start("share", world, 0..world);
        for rank in &mut ranks {
            rank.expect("shared");
        }
        for rank in ranks {
            assert!(rank.ends().success());
        }
    }
}

#[test]
fn a_rank_that_was_never_started_is_named() {
    let mut ranks = start("meet", 3, 0..2);
    for rank in &mut ranks {
        let error = rank.says().expect("an error");
        assert!(error.contains("rank 2 did not come within 4s"), "{error}");
    }
    for rank in ranks {
        assert!(rank.ends().success());
    }
}

#[test]
fn without_rank_0_the_others_name_it() {
    let mut ranks = start("meet", 2, [1]);
    let error = ranks[0].says().expect("an error");
    assert!(error.starts_with("rank 0 did not come to 127.0.0.1 within 4s"), "{error}");
}

/// Ranks of a group of three that have met.
fn met() -> Vec<Process> {
    let mut ranks = start("gather", 3, 0..3);
    for step in ["started", "met"] {
        for rank in &mut ranks {
            rank.expect(step);
            if step == "started" {
                rank.go_on();
            }
        }
    }
    ranks
}

/// Lets all but `culprit` gather, and checks what they say.
fn others_say(
    mut ranks: Vec<Process>,
    culprit: usize,
    deadline: Duration,
    check: impl Fn(&str) -> bool,
) {
    let mut others: Vec<&mut Process> =
        ranks.iter_mut().enumerate().filter(|(rank, _)| *rank != culprit).map(|(_, p)| p).collect();
    let deadline = deadline.as_secs().to_string();
    others.iter_mut().for_each(|rank| rank.read(&deadline));
    for rank in &mut others {
        let error = rank.says().expect("an error");
        assert!(check(&error), "{error}");
    }
    others.iter_mut().for_each(|rank| rank.go_on());
    for (index, rank) in ranks.into_iter().enumerate() {
        if index != culprit {
            assert!(rank.ends().success());
        }
    }
}

#[test]
fn a_rank_that_is_killed_before_a_call_is_named() {
    for culprit in [0, 2] {
        let ranks = met();
        ranks[culprit].signal(Signal::KILL);
        let text = format!("growing: rank {culprit} has left the group");
        others_say(ranks, culprit, LONG, |error| error == text);
    }
}

#[test]
fn a_rank_that_is_killed_while_all_set_up_is_named() {
    let mut ranks = start("meet", 3, 0..2);
    // It has joined or has not, and is named as having left or as missing like the third.
    ranks[1].signal(Signal::KILL);
    let error = ranks[0].says().expect("an error");
    assert!(error.starts_with("meeting: ") && error.contains("rank 1"), "{error}");
    assert!(ranks.remove(0).ends().success());
}

#[test]
fn a_rank_that_is_stopped_is_named_by_the_deadline() {
    for culprit in [0, 2] {
        let ranks = met();
        ranks[culprit].signal(Signal::STOP);
        let text = format!("rank {culprit}");
        let named = |error: &str| error.starts_with("growing: ") && error.contains(&text);
        others_say(ranks, culprit, SHORT, named);
    }
}
