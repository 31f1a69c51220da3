//! The ranks of a benchmark as threads, and the thread that listens to them.

use std::any::Any;
use std::io::{self, IsTerminal};
use std::sync::{OnceLock, mpsc};
use std::thread;

use graph_ep::ep_context::error::chain;
use graph_ep::ep_context::rendezvous::{RendezvousError, ThreadRendezvous};
use graph_ep::{Backend, BackendError, EpContext, ThreadGroup};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::args::MeasureArgs;
use super::cases::{Kernels, Measured};
use super::error::BenchError;
use super::inputs::Given;
use super::limits::{self, Limits};
use super::machine::Machine;
use super::ops::{self, Join, OpError, Setup};
use super::report::{Entry, Limit};
use crate::gauge::Gauge;

/// What was measured.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) limits: Vec<Limit>,
    pub(super) results: Vec<Entry>,
}

/// What a rank tells.
enum Message {
    Limits(Vec<Limit>),
    Entry(Box<Entry>),
    /// Everything of one shape is measured.
    Shape,
}

/// The places of one rank: in the group that measures limits, and in that of each shape.
struct Seat {
    limits: ThreadRendezvous,
    shapes: Vec<ThreadRendezvous>,
}

/// Measures shapes of one number of ranks, each rank on the device that `backend` makes for it with the
/// kernels that a shape runs.
pub(super) fn run<B: Gauge>(
    args: &MeasureArgs,
    machine: &Machine,
    shapes: &[Measured],
    backend: &(impl Fn(usize, Kernels) -> Result<B, BackendError> + Sync),
    join: Option<Join<B>>,
) -> Result<Found, BenchError> {
    let ranks = shapes.first().map_or(0, |measured| measured.shape.ranks);
    let seats = seats(ranks, shapes.len())
        .map_err(|error| BenchError::Setup(graph_ep::Error::Context(error.into())))?;
    // Made up once for all ranks, by whichever comes first.
    let given: Vec<OnceLock<Given>> = shapes.iter().map(|_| OnceLock::new()).collect();
    let (sender, receiver) = mpsc::channel();
    let (failures, failed) = mpsc::channel();
    let work = Work { args, machine, shapes, given: &given };
    let mut found = Found::default();
    let bar = bar(shapes.len());
    thread::scope(|scope| {
        let mut threads = Vec::with_capacity(ranks);
        for (rank, seat) in seats.into_iter().enumerate() {
            let (work, failures) = (&work, failures.clone());
            // One rank speaks for all: they agree.
            let tell = (rank == 0).then(|| sender.clone());
            let started = thread::Builder::new().name(format!("rank-{rank}")).spawn_scoped(
                scope,
                move || {
                    let tell = |message| {
                        // Nobody listens any more only if the main thread is unwinding.
                        let _ = tell.as_ref().map(|sender| sender.send(message));
                    };
                    let backend = |kernels| backend(rank, kernels);
                    if let Err(error) = work.measure(backend, seat, join, tell) {
                        let _ = failures.send((rank, error.is_echo(), chain(&error)));
                    }
                },
            );
            threads.push(started.map_err(|source| BenchError::Thread { rank, source })?);
        }
        drop((sender, failures));
        for message in receiver {
            match message {
                Message::Limits(limits) => found.limits = limits,
                Message::Entry(entry) => found.results.push(*entry),
                Message::Shape => bar.inc(1),
            }
        }
        for (rank, thread) in threads.into_iter().enumerate() {
            if let Err(panic) = thread.join() {
                return Err(BenchError::Rank(format!("rank {rank} panicked: {}", said(&*panic))));
            }
        }
        Ok(())
    })?;
    bar.finish_and_clear();
    match cause(failed.into_iter().collect()) {
        None => Ok(found),
        Some(failure) => Err(BenchError::Rank(failure)),
    }
}

/// What every rank is to do.
struct Work<'w> {
    args: &'w MeasureArgs,
    machine: &'w Machine,
    shapes: &'w [Measured],
    given: &'w [OnceLock<Given>],
}

impl Work<'_> {
    /// Measures everything on one rank.
    fn measure<B: Gauge>(
        &self,
        backend: impl Fn(Kernels) -> Result<B, BackendError>,
        seat: Seat,
        join: Option<Join<B>>,
        tell: impl Fn(Message),
    ) -> Result<(), OpError> {
        let counting = backend(Kernels::Counting)?;
        let mut bare = None;
        let limits = self.limits(&counting, seat.limits)?;
        tell(Message::Limits(limits.all().to_vec()));
        let ranks = self.shapes.first().map_or(0, |measured| measured.shape.ranks);
        let setup = Setup {
            devices: self.machine.places(ranks).devices,
            gpus: self.machine.gpus_of(ranks),
            limits,
            samples: self.args.samples,
            quick: self.args.quick,
            grow_bytes: self.machine.grow_bytes(ranks),
            memory: self.machine.memory_of(ranks),
            most_held: self.machine.most_held.clone(),
        };
        for ((measured, given), place) in self.shapes.iter().zip(self.given).zip(seat.shapes) {
            tracing::info!(shape = ?measured.shape, layers = measured.layers, "measuring");
            let given = given.get_or_init(|| {
                let layers = measured.layers.max(measured.step_layers);
                Given::new(&measured.shape, layers, self.args.seed)
            });
            let backend = match measured.kernels {
                Kernels::Counting => &counting,
                // Made by the first shape that needs it: all ranks are there at once.
                Kernels::Bare => match &mut bare {
                    Some(made) => made,
                    none => none.insert(backend(Kernels::Bare)?),
                },
            };
            ops::measure(backend.clone(), place, measured, given, &setup, join, |entry| {
                tell(Message::Entry(Box::new(entry)));
            })?;
            tell(Message::Shape);
        }
        Ok(())
    }

    fn limits<B: Backend>(&self, backend: &B, place: ThreadRendezvous) -> Result<Limits, OpError> {
        let context = EpContext::builder(backend.clone(), place).build()?;
        let places = self.machine.places(context.world());
        Ok(limits::measure(&context, &places, self.machine.limits)?)
    }
}

/// The places of every rank.
fn seats(ranks: usize, shapes: usize) -> Result<Vec<Seat>, RendezvousError> {
    let mut seats: Vec<Seat> = ThreadGroup::new(ranks)?
        .into_iter()
        .map(|limits| Seat { limits, shapes: Vec::with_capacity(shapes) })
        .collect();
    for _ in 0..shapes {
        for (seat, place) in seats.iter_mut().zip(ThreadGroup::new(ranks)?) {
            seat.shapes.push(place);
        }
    }
    Ok(seats)
}

/// Why the ranks stopped: what one says that was not told by another. Each comes with its rank, and
/// whether it was told.
fn cause(mut failures: Vec<(usize, bool, String)>) -> Option<String> {
    failures.sort_by_key(|(rank, echo, _)| (*echo, *rank));
    let (rank, _, line) = failures.into_iter().next()?;
    Some(if line.starts_with("rank ") { line } else { format!("rank {rank}: {line}") })
}

fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
    text.unwrap_or_else(|| "with a value that is no text".to_owned())
}

/// The bar that a person at a terminal sees.
fn bar(shapes: usize) -> ProgressBar {
    let target = match io::stderr().is_terminal() {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    };
    let bar = ProgressBar::with_draw_target(Some(shapes as u64), target);
    // The template is constant; if it were wrong, indicatif's own is as good.
    if let Ok(style) = ProgressStyle::with_template("shape {pos}/{len} [{bar:40}]") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::bench::args::tests::parse;
    use crate::bench::cases::measured;
    use crate::run::device::{self, Devices};

    #[test]
    fn the_rank_that_knows_why_is_heard() {
        assert_eq!(cause(vec![]), None);
        let told = |rank, echo, line: &str| (rank, echo, line.to_owned());
        let failures = vec![told(0, true, "rank 1 has left"), told(1, false, "no memory")];
        assert_eq!(cause(failures), Some("rank 1: no memory".to_owned()));
        let failures = vec![told(2, true, "x"), told(1, true, "rank 0 gave up: y")];
        assert_eq!(cause(failures), Some("rank 0 gave up: y".to_owned()));
    }

    #[test]
    fn a_rank_without_a_device_ends_the_program_with_its_error() {
        let args = parse("--quick --backend host --ops pair --ranks 3 --tokens 4").unwrap().measure;
        let machine = Machine::new(&Devices::Host, &args);
        let all = measured(&args, 0, machine.memory);
        let backend = |rank, _| match rank {
            1 => Err(BackendError::Unavailable { what: "GPU 1".into(), reason: "gone".into() }),
            _ => device::host(rank),
        };
        let error = run(&args, &machine, &all, &backend, None).expect_err("a rank is missing");
        assert_eq!(error.to_string(), "rank 1: GPU 1 is not available: gone");
    }

    #[test]
    fn kernels_are_made_once_a_rank_and_only_where_a_shape_runs_them() {
        let made_for = |ops: &str| {
            let line = format!("--quick --backend host --ops {ops} --ranks 2 --tokens 4,5");
            let args = parse(&line).unwrap().measure;
            let machine = Machine::new(&Devices::Host, &args);
            // As on two GPUs, where some shapes are also measured without counters.
            let all = measured(&args, 2, machine.memory);
            let made = Mutex::new(Vec::new());
            let backend = |rank, kernels| {
                made.lock().unwrap().push((rank, kernels == Kernels::Bare));
                device::host(rank)
            };
            let found = run(&args, &machine, &all, &backend, None).expect("it can be measured");
            assert!(found.results.iter().all(|entry| entry.verified));
            let mut made = made.into_inner().unwrap();
            made.sort_unstable();
            made
        };
        assert_eq!(made_for("pair"), [(0, false), (1, false)]);
        let both = [(0, false), (0, true), (1, false), (1, true)];
        assert_eq!(made_for("pair,counters"), both);
    }

    #[test]
    fn a_rank_that_panics_ends_the_program() {
        let args = parse("--quick --backend host --ops pair --ranks 2 --tokens 4").unwrap().measure;
        let machine = Machine::new(&Devices::Host, &args);
        let all = measured(&args, 0, machine.memory);
        let backend = |rank, _| {
            assert_ne!(rank, 1, "no rank 1");
            device::host(rank)
        };
        let error = run(&args, &machine, &all, &backend, None).expect_err("a rank is missing");
        assert!(error.to_string().contains("rank 1 panicked"), "{error}");
        assert!(error.to_string().contains("no rank 1"), "{error}");
    }
}
