//! The ranks of a run as processes: started here, or by a launcher that sets the variables.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use graph_ep::ep_context::rendezvous::{Environment, EnvironmentError, TcpError, TcpRendezvous};
use graph_ep::{Backend, BackendError, Deadlines, ExpertParallel, Phase};
use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};

use super::collect::Collector;
use super::group;
use super::interrupt::{self, Second};
use super::step::StepDone;
use super::{Plan, RunError, line};
use crate::output;
use crate::progress::Progress;
use crate::report::Report;
use crate::verdict::Verdict;

/// Set in processes that were started here, to the process that started them.
const PARENT: &str = "GRAPH_EP_PARENT";

/// How long after the first failure of a rank the others may still take to notice and report it:
/// longer than any deadline of a phase.
const GRACE: Duration = Duration::from_secs(90);

/// Why ranks could not run as processes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessError {
    /// A variable that a launcher sets is missing or wrong.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// The ranks did not meet.
    #[error("the ranks did not meet")]
    Meet(#[from] TcpError),
    /// A process could not be started or waited for.
    #[error("cannot {what} the process of a rank")]
    Process {
        /// What was tried.
        what: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// The process that started this rank ended before the rank could watch it.
    #[error("the process that started this rank is gone")]
    Orphaned,
    /// Ranks could not tell each other of a step or of the end.
    #[error("the ranks cannot tell each other of the run: {0}")]
    Report(String),
}

impl ProcessError {
    /// How a run that ended so is told to the shell.
    pub(super) fn verdict(&self) -> Verdict {
        match self {
            Self::Environment(_) => Verdict::BadInput,
            _ => Verdict::Failed,
        }
    }
}

/// Whether a launcher made this process a rank.
pub(super) fn is_rank() -> bool {
    std::env::var_os("RANK").is_some() && std::env::var_os("WORLD_SIZE").is_some()
}

/// How many ranks the launcher's group has.
pub(super) fn world() -> Result<usize, ProcessError> {
    Ok(Environment::from_environment()?.tcp.world())
}

/// What a rank says at the end of a run.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct End {
    bytes: u64,
    failure: Option<String>,
}

impl End {
    /// The end of the whole run, of which this is one rank's: the most bytes, and why it failed, which
    /// each rank knows best of itself.
    ///
    /// A group that has failed cannot gather any more, and then each rank speaks for itself. Where that
    /// is the first sign of a failure, it is one: a rank was lost after its last step.
    fn of_all(self, ends: Result<Vec<Self>, ProcessError>) -> Self {
        match ends {
            Ok(ends) => Self {
                bytes: ends.iter().map(|end| end.bytes).max().unwrap_or(self.bytes),
                failure: self.failure.or_else(|| ends.into_iter().find_map(|end| end.failure)),
            },
            Err(error) => Self { failure: self.failure.or_else(|| Some(line(&error))), ..self },
        }
    }
}

/// What a rank does before all else: from here on it ends with the process that started it, and Ctrl-C
/// stops it between two steps.
pub(super) fn begin_rank() -> Result<(), RunError> {
    let second = match die_with_parent()? {
        true => Second::IsIgnored,
        false => Second::Ends,
    };
    interrupt::listen(second).map_err(RunError::Interrupt)
}

/// Runs this process's rank. Rank 0 speaks for all.
pub(super) fn run_rank<B: Backend>(
    plan: &Plan,
    backend: impl Fn(usize) -> Result<B, BackendError>,
) -> Result<Spoken, RunError> {
    let environment = Environment::from_environment().map_err(ProcessError::from)?;
    let tcp = environment.tcp;
    let backend = backend(environment.local_rank).map_err(|error| RunError::Setup(error.into()))?;
    let deadline = Deadlines::default().of(Phase::Setup);
    let meet = |name: &str| -> Result<TcpRendezvous, RunError> {
        let named = tcp.clone().with_group(format!("{}/{name}", tcp.group()));
        let met = named.and_then(|config| TcpRendezvous::meet(&config, deadline));
        Ok(met.map_err(ProcessError::from)?)
    };
    let rank = tcp.rank().index();
    let main = meet("main")?;
    let groups = group::build(plan, backend, main, || meet("eager"))?;
    let progress = (rank == 0).then(|| Progress::new(plan.routing.steps()));
    let mut collector = progress.as_ref().map(|progress| Collector::new(plan, progress, B::NAME));
    let end = group::run_rank(plan, rank, &groups, |done| {
        let all: Vec<StepDone> = gather(&groups.main, "the report of a step", &done)?;
        if let Some(collector) = &mut collector {
            all.into_iter().for_each(|done| collector.take(done));
        }
        Ok(())
    });
    let (bytes, failure) = (end.bytes, group::first_failure(vec![end])?);
    let mine = End { bytes, failure };
    let ends = gather(&groups.main, "the end of the run", &mine);
    let whole = ends.is_ok();
    let End { bytes, failure } = mine.of_all(ends);
    match collector {
        Some(collector) => Ok(Spoken::Report(Box::new(collector.finish(failure, bytes)))),
        None => match failure {
            None => Ok(Spoken::Nothing(Verdict::Verified)),
            // Rank 0 says so for all.
            Some(_) if whole => Ok(Spoken::Nothing(Verdict::Failed)),
            Some(failure) => Err(RunError::Rank { rank, failure }),
        },
    }
}

/// What one rank has to say to a person.
pub(super) enum Spoken {
    /// Rank 0's report of all.
    Report(Box<Report>),
    /// Nothing, but how it ended.
    Nothing(Verdict),
}

/// Exchanges one value of every rank.
fn gather<B: Backend, T: Serialize + for<'de> Deserialize<'de>>(
    group: &ExpertParallel<B>,
    purpose: &str,
    value: &T,
) -> Result<Vec<T>, ProcessError> {
    let wrong = |error: postcard::Error| ProcessError::Report(error.to_string());
    let bytes = postcard::to_allocvec(value).map_err(wrong)?;
    let deadline = group.context().deadlines().of(Phase::Record);
    let all = group
        .context()
        .rendezvous()
        .all_gather(purpose, &bytes, deadline)
        .map_err(|error| ProcessError::Report(error.to_string()))?;
    all.iter().map(|bytes| postcard::from_bytes(bytes).map_err(wrong)).collect()
}

/// Starts a process for each rank, with the arguments of this one, and waits for all of them. Ctrl-C is
/// passed on to them.
pub(super) fn spawn(ranks: usize) -> Result<Verdict, RunError> {
    interrupt::listen(Second::Ends).map_err(RunError::Interrupt)?;
    Ok(spawn_all(ranks)?.wait().map_err(failed("wait for"))?)
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> ProcessError {
    move |source| ProcessError::Process { what, source }
}

fn spawn_all(ranks: usize) -> Result<Children, ProcessError> {
    let mut secret = [0u8; 32];
    let mut filled = 0;
    while filled < secret.len() {
        filled +=
            rustix::rand::getrandom(&mut secret[filled..], rustix::rand::GetRandomFlags::empty())
                .map_err(|error| failed("draw a token for")(error.into()))?;
    }
    let token: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
    // Rank 0 takes the first free port of several behind this one; the run's name keeps it apart
    // from other groups that it may come across.
    let port = 20_000 + u16::from_le_bytes([secret[0], secret[1]]) % 20_000;
    let program = std::env::current_exe().map_err(failed("find the program for"))?;
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let mut children = Children(Vec::new());
    for rank in 0..ranks {
        let output = if rank == 0 { Stdio::inherit() } else { Stdio::null() };
        let child = Command::new(&program)
            .args(&arguments)
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("TORCHELASTIC_USE_AGENT_STORE", "1")
            .env("TORCHELASTIC_RUN_ID", &token[..16])
            .env("GRAPH_EP_JOB_TOKEN", &token)
            .env(PARENT, std::process::id().to_string())
            .env_remove("GRAPH_EP_PORT")
            .stdin(Stdio::null())
            .stdout(output)
            .spawn()
            .map_err(failed("start"))?;
        children.0.push(child);
    }
    Ok(children)
}

/// Processes that do not outlive this value.
struct Children(Vec<Child>);

impl Children {
    /// Waits until all have ended. After the first failure the others have a while to report it. A Ctrl-C
    /// that only this process was sent is passed on.
    fn wait(&mut self) -> io::Result<Verdict> {
        let mut ended: Vec<Option<ExitStatus>> = vec![None; self.0.len()];
        let mut failed_at: Option<Instant> = None;
        let mut interrupted = false;
        loop {
            for (child, ended) in self.0.iter_mut().zip(&mut ended) {
                if ended.is_none() {
                    *ended = child.try_wait()?;
                }
            }
            if interrupt::requested() && !interrupted {
                interrupted = true;
                self.interrupt(&ended);
            }
            let unheard = |status: &ExitStatus| status.signal() == Some(Signal::INT.as_raw());
            if interrupted && ended.iter().flatten().any(unheard) {
                // That rank did not listen yet: no step has run, and the others would wait for it.
                output::tell("failed: interrupted before the ranks had met");
                return Ok(Verdict::Failed);
            }
            if ended.iter().flatten().any(|status| !status.success()) {
                let since = *failed_at.get_or_insert_with(Instant::now);
                if since.elapsed() > GRACE {
                    return Ok(Verdict::Failed);
                }
            }
            if ended.iter().all(Option::is_some) {
                return Ok(verdict(ended.into_iter().flatten()));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Sends Ctrl-C to those that have not ended. Most had it from the terminal already, which is no
    /// matter: to them a second one is no more than the first.
    fn interrupt(&self, ended: &[Option<ExitStatus>]) {
        for (child, _) in self.0.iter().zip(ended).filter(|(_, ended)| ended.is_none()) {
            // It was not waited for, so its number is still its own.
            if let Err(error) = rustix::process::kill_process(Pid::from_child(child), Signal::INT) {
                tracing::warn!(%error, "a rank could not be interrupted");
            }
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Both fail only for a process that has been waited for.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Bad input is so for all; one that failed speaks for all.
fn verdict(ended: impl Iterator<Item = ExitStatus>) -> Verdict {
    let mut verdict = Verdict::Verified;
    for status in ended {
        match status.code() {
            Some(0) => {}
            Some(2) => return Verdict::BadInput,
            _ => verdict = Verdict::Failed,
        }
    }
    verdict
}

/// Lets this process end when the one that started it does, however that ends. Whether `spawn` started
/// it, and so whether there is one to end with.
fn die_with_parent() -> Result<bool, ProcessError> {
    let Some(parent) = std::env::var(PARENT).ok().and_then(|id| id.parse().ok()) else {
        return Ok(false);
    };
    rustix::process::set_parent_process_death_signal(Some(Signal::TERM))
        .map_err(|error| failed("watch the parent of")(error.into()))?;
    // A parent that ended before that sends no signal any more.
    match rustix::process::getppid().map(Pid::as_raw_pid) == Some(parent) {
        true => Ok(true),
        false => Err(ProcessError::Orphaned),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(bytes: u64, failure: Option<&str>) -> End {
        End { bytes, failure: failure.map(str::to_owned) }
    }

    #[test]
    fn a_run_ends_as_its_ranks_say() {
        let all = || Ok(vec![end(3, None), end(5, None)]);
        assert_eq!(end(3, None).of_all(all()), end(5, None));
        let all = || Ok(vec![end(3, None), end(5, Some("rank 1: why"))]);
        assert_eq!(end(3, None).of_all(all()), end(5, Some("rank 1: why")));
        assert_eq!(end(3, Some("mine")).of_all(all()), end(5, Some("mine")));
    }

    #[test]
    fn a_rank_that_is_lost_after_the_last_step_is_a_failure() {
        let lost = || Err(ProcessError::Report("rank 1 is gone".to_owned()));
        let told = "the ranks cannot tell each other of the run: rank 1 is gone";
        assert_eq!(end(3, None).of_all(lost()), end(3, Some(told)));
        assert_eq!(end(3, Some("mine")).of_all(lost()), end(3, Some("mine")));
    }
}
