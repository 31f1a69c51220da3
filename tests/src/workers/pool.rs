//! The workers, as the process of the harness sees them: told what to run, heard, ended and replaced.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::process::Pid;

use super::line::{Call, Line, Order, Told, wait};
use super::worker;
use crate::fork::{self, Status};
use crate::harness::{self, Check, Verdict};
use crate::meeting::Meeting;

/// How long workers have to say something once one of them has died, before they are killed: its peers
/// notice it, and say what they saw. Also how long they have to end when they are told to.
const GRACE: Duration = Duration::from_secs(10);

/// Workers, which are there once a check has run.
#[derive(Debug)]
pub(super) struct Pool {
    size: usize,
    pub(super) longest: Duration,
    checks: Vec<Check>,
    workers: Vec<Worker>,
}

#[derive(Debug)]
struct Worker {
    id: Pid,
    line: Line,
    /// What it has told since all were told something.
    told: Option<(Told, Vec<u8>)>,
    ended: Option<Status>,
}

impl Pool {
    /// For `size` workers, which know `checks`, each with a name of its own. In a check they may be silent for
    /// so long.
    pub(super) fn new(size: usize, longest: Duration, checks: Vec<Check>) -> Self {
        Self { size, longest, checks, workers: Vec::new() }
    }

    /// The processes that there are now.
    pub(super) fn ids(&self) -> Vec<Pid> {
        self.workers.iter().map(|worker| worker.id).collect()
    }

    /// Runs a check on the workers: their verdict. A pool without any runs it here, to be told that it is
    /// skipped. Where a check did not pass, what it has left in its workers is not for the next one, which has
    /// new ones.
    ///
    /// # Errors
    ///
    /// Why there is no verdict: workers died, were silent for too long, or did not agree; and what each of them
    /// said last.
    ///
    /// # Panics
    ///
    /// If this process has other threads, or the system refuses processes or sockets.
    pub(super) fn run(&mut self, check: &Check) -> Result<Verdict, String> {
        if self.size == 0 {
            return Ok(harness::verdict(check.run));
        }
        if self.workers.is_empty() {
            self.start();
        }
        let verdict = self.lead(check);
        if !matches!(verdict, Ok(Verdict::Passed | Verdict::Skipped(_))) {
            self.workers
                .drain(..)
                .filter(Worker::is_there)
                .for_each(|worker| fork::kill(worker.id));
        }
        verdict
    }

    fn start(&mut self) {
        for rank in 0..self.size {
            let (line, other) = Line::pair().expect("a pair of sockets");
            let (mut line, mut other) = (Some(line), Some(other));
            let (elders, checks) = (&mut self.workers, &self.checks);
            let id = fork::start(|| {
                // Ends that are for the harness.
                elders.clear();
                line = None;
                worker::serve(rank, other.take().expect("it was just made"), checks);
            });
            let line = line.take().expect("it was just made");
            self.workers.push(Worker { id, line, told: None, ended: None });
        }
    }

    /// Leads the workers through a check.
    fn lead(&mut self, check: &Check) -> Result<Verdict, String> {
        let (mut order, mut rest) = (Order::Run(check.name.to_owned()), Vec::new());
        loop {
            self.tell(&order, &rest);
            self.hear()?;
            (order, rest) = if let Some(call) = self.call() {
                if call.world > self.size {
                    return Err(format!("of {} workers{}", self.size, self.last_words()));
                }
                (Order::Meet(Meeting::new(call.world)), Vec::new())
            } else if let Some(results) = self.results() {
                results
            } else if let Some(verdict) = self.verdict() {
                return Ok(verdict);
            } else {
                return Err(format!("workers do not agree{}", self.last_words()));
            };
        }
    }

    /// Tells all workers the same. One that does not listen is found out when nothing is heard of it.
    fn tell(&mut self, order: &Order, rest: &[u8]) {
        let deadline = Instant::now() + self.longest;
        for worker in &mut self.workers {
            worker.told = None;
            let _ = worker.line.send(order, rest, Some(deadline));
        }
    }

    /// Waits until every worker has told something.
    fn hear(&mut self) -> Result<(), String> {
        let start = Instant::now();
        let mut lost: Option<Instant> = None;
        loop {
            self.workers.iter_mut().for_each(Worker::listen);
            if self.workers.iter().all(|worker| worker.told.is_some()) {
                return Ok(());
            }
            if self.workers.iter().any(|worker| worker.ended.is_some()) {
                lost.get_or_insert_with(Instant::now);
            }
            let awaited = self.workers.iter().filter(|worker| worker.is_awaited());
            let mut lines: Vec<_> =
                awaited.map(|worker| PollFd::new(&worker.line, PollFlags::IN)).collect();
            if lost.is_some_and(|lost| lines.is_empty() || lost.elapsed() > GRACE) {
                return Err(format!("a worker is gone{}", self.last_words()));
            }
            if start.elapsed() > self.longest {
                let longest = self.longest;
                return Err(format!("not done within {longest:?}{}", self.last_words()));
            }
            wait(&mut lines);
        }
    }

    /// What all workers have told.
    fn told(&self) -> impl Iterator<Item = &Told> {
        self.workers.iter().filter_map(|worker| Some(&worker.told.as_ref()?.0))
    }

    /// The group that all ask for.
    fn call(&self) -> Option<Call> {
        let mut calls = self.told().map(|told| match told {
            Told::Asks(call) => Some(call),
            _ => None,
        });
        let first = calls.next()??;
        calls.all(|call| call == Some(first)).then(|| first.clone())
    }

    /// What is to be told of what the ranks returned.
    fn results(&self) -> Option<(Order, Vec<u8>)> {
        let (mut results, mut rest) = (Vec::new(), Vec::new());
        for worker in &self.workers {
            let (told, returned) = worker.told.as_ref()?;
            match told {
                Told::Returned => {
                    results.push(Ok(returned.len()));
                    rest.extend_from_slice(returned);
                }
                Told::Said(text) => results.push(Err(text.clone())),
                Told::Waits => {}
                Told::Asks(_) | Told::Ended { .. } => return None,
            }
        }
        Some((Order::Results(results), rest))
    }

    /// How the check ended in all of them.
    fn verdict(&self) -> Option<Verdict> {
        let mut verdicts = Vec::new();
        for told in self.told() {
            let Told::Ended { verdict, on_fewer_ranks } = told else { return None };
            if *on_fewer_ranks {
                harness::on_fewer_ranks();
            }
            verdicts.push(verdict);
        }
        let first = *verdicts.first()?;
        verdicts.iter().all(|verdict| *verdict == first).then(|| first.clone())
    }

    /// What each worker told last, or how it ended, a line each.
    fn last_words(&self) -> String {
        let words = self.workers.iter().enumerate();
        words.map(|(number, worker)| format!("\nworker {number} {}", worker.last_words())).collect()
    }
}

impl Drop for Pool {
    /// Lets workers end by themselves, as far as they do.
    fn drop(&mut self) {
        let workers = self.workers.drain(..).filter(Worker::is_there);
        // Each sees that its line is closed.
        let ids: Vec<_> = workers.map(|worker| worker.id).collect();
        let start = Instant::now();
        for id in ids {
            if !fork::ends_within(id, GRACE.saturating_sub(start.elapsed())) {
                fork::kill(id);
            }
        }
    }
}

impl Worker {
    /// Whether its number is still its own.
    fn is_there(&self) -> bool {
        !matches!(self.ended, Some(Status::Ended | Status::Killed(_)))
    }

    /// Whether it may still tell what it was asked for.
    fn is_awaited(&self) -> bool {
        self.told.is_none() && self.ended.is_none()
    }

    /// Takes note of what it has told, or of its end.
    fn listen(&mut self) {
        if self.told.is_some() {
            return;
        }
        // Before it is heard for the last time.
        self.ended = self.ended.or_else(|| fork::status(self.id));
        while matches!(self.line.read(), Ok(true)) {}
        // What cannot be read is nothing.
        self.told = self.line.take().ok().flatten();
    }

    fn last_words(&self) -> String {
        match (&self.told, self.ended) {
            (Some((Told::Asks(call), _)), _) => {
                let Call { before, world, body } = call;
                format!("asked for {world} ranks, after {before} such calls, for {body}")
            }
            (Some((Told::Returned, _)), _) => "had its rank return".to_owned(),
            (Some((Told::Said(text), _)), _) => format!("had its rank say: {text}"),
            (Some((Told::Waits, _)), _) => "had no rank".to_owned(),
            (Some((Told::Ended { verdict, .. }, _)), _) => match verdict {
                Verdict::Passed => "passed".to_owned(),
                Verdict::Skipped(why) => format!("skipped it: {why}"),
                Verdict::Failed(text) => format!("failed: {text}"),
            },
            (None, Some(status)) => status.to_string(),
            (None, None) => "said nothing".to_owned(),
        }
    }
}
