//! One worker: runs the checks that it is told to, and the bodies of its rank.

use std::cell::RefCell;
use std::panic;
use std::sync::atomic::{AtomicBool, Ordering};

use graph_ep::ep_context::rendezvous::TcpRendezvous;

use super::line::{Call, Line, Order, Told};
use crate::backend::RankResult;
use crate::harness::{self, Check};
use crate::processes::{Leaves, outcome};

/// What a worker knows of itself.
#[derive(Debug)]
struct Station {
    rank: usize,
    line: Line,
    /// Groups that the check has asked for.
    calls: usize,
}

thread_local! {
    /// Set in the process of a worker, on the thread that runs its checks.
    static STATION: RefCell<Option<Station>> = const { RefCell::new(None) };
}

/// Whether another worker says whatever this one does.
static ECHO: AtomicBool = AtomicBool::new(false);

/// Whether another process says what this one is about to say.
pub(crate) fn is_echo() -> bool {
    ECHO.load(Ordering::Relaxed)
}

/// Runs what the harness tells at the other end of `line`, until that is closed.
pub(super) fn serve(rank: usize, line: Line, checks: &[Check]) {
    let echoes = rank > 0;
    ECHO.store(echoes, Ordering::Relaxed);
    let say = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        if !is_echo() {
            say(panic);
        }
    }));
    STATION.set(Some(Station { rank, line, calls: 0 }));
    loop {
        let Ok((Order::Run(name), _)) = station(|station| station.line.receive()) else { return };
        let Some(check) = checks.iter().find(|check| check.name == name) else { return };
        station(|station| station.calls = 0);
        let (verdict, on_fewer_ranks) = harness::counting(|| harness::verdict(check.run));
        let told = Told::Ended { verdict, on_fewer_ranks };
        if station(|station| station.line.send(&told, &[], None)).is_err() {
            return;
        }
    }
}

fn station<R>(with: impl FnOnce(&mut Station) -> R) -> R {
    STATION.with_borrow_mut(|station| {
        with(station.as_mut().expect("checks of workers are run by `workers::main`, on its thread"))
    })
}

/// Runs `body` on the ranks of a group, of which this worker may be one; what all of them returned or said.
///
/// # Panics
///
/// If this is no worker. Where the harness is gone or answers nothing that fits, the check ends so.
pub(super) fn on_ranks<R: RankResult>(
    leaves: Leaves,
    world: usize,
    name: &str,
    body: impl FnOnce(TcpRendezvous) -> R,
) -> Vec<Result<R, String>> {
    let (rank, order) = station(|station| {
        let call = Call { before: station.calls, world, body: name.to_owned() };
        station.calls += 1;
        (station.rank, station.ask(&Told::Asks(call), &[]).0)
    });
    let Order::Meet(meeting) = order else { panic!("{order:?} in place of a meeting") };
    let (told, returned) = match rank < world {
        true => {
            let echoes = ECHO.swap(false, Ordering::Relaxed);
            let returned = outcome(leaves, || body(meeting.join(rank)))
                .and_then(|result| postcard::to_allocvec(&result).map_err(|e| e.to_string()));
            ECHO.store(echoes, Ordering::Relaxed);
            match returned {
                Ok(bytes) => (Told::Returned, bytes),
                Err(said) => (Told::Said(said), Vec::new()),
            }
        }
        false => (Told::Waits, Vec::new()),
    };
    let (order, bytes) = station(|station| station.ask(&told, &returned));
    let Order::Results(results) = order else { panic!("{order:?} in place of results") };
    let mut bytes = bytes.as_slice();
    let decode = |result: Result<usize, String>| {
        let of_rank = bytes.split_off(..result?).ok_or("less than it said")?;
        postcard::from_bytes(of_rank)
            .map_err(|error| format!("returned what cannot be read: {error}"))
    };
    results.into_iter().map(decode).collect()
}

impl Station {
    /// Tells the harness something, and waits for what all are told once each has said as much.
    fn ask(&mut self, told: &Told, rest: &[u8]) -> (Order, Vec<u8>) {
        self.line.send(told, rest, None).expect("the harness is there");
        self.line.receive().expect("the harness answers")
    }
}
