//! A harness that runs checks one after the other on the thread of `main`: where no check leaves a thread, its
//! process may therefore be forked. It knows checks that are skipped, which are not passed. It takes the
//! arguments that `cargo test` passes on: filters, `--exact`, `--skip`, `--list`, `--report-time`; others are
//! accepted and change nothing.

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::ExitCode;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::backend::{said, say_skipped};

/// A check with a name.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// The theme and the check.
    pub name: &'static str,
    /// Panics where something is wrong.
    pub run: fn(),
}

/// How a check ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Verdict {
    /// All was right.
    Passed,
    /// Why.
    Skipped(String),
    /// What it said.
    Failed(String),
}

/// What unwinds from a check that is skipped.
struct Skip(String);

/// Ends the check that runs, since the machine lacks what the rest of it needs: neither passed nor
/// failed. To be called on the thread of the check.
pub fn skip(why: String) -> ! {
    // Not a panic, whose message would be printed.
    resume_unwind(Box::new(Skip(why)))
}

thread_local! {
    /// Whether the check that runs on this thread has made a group smaller than it asks for.
    static FEWER_RANKS: Cell<bool> = const { Cell::new(false) };
}

/// Says that the check that runs has no group of as many ranks as it asks for, since there may be none on
/// this machine. It shows less then, so the harness counts such checks.
pub(crate) fn on_fewer_ranks() {
    FEWER_RANKS.set(true);
}

/// Runs a check as a `#[test]`. libtest knows no test that is skipped once it has begun, and takes it for
/// passed: so it is said, past libtest, which keeps what such tests print.
pub fn test(name: &str, run: fn()) {
    match catch_unwind(AssertUnwindSafe(run)).map_err(|payload| payload.downcast::<Skip>()) {
        Ok(()) => {}
        Err(Ok(skip)) => say_skipped(name, &skip.0),
        Err(Err(panic)) => resume_unwind(panic),
    }
}

/// Runs a check.
pub(crate) fn verdict(run: fn()) -> Verdict {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(()) => Verdict::Passed,
        Err(payload) => match payload.downcast::<Skip>() {
            Ok(skip) => Verdict::Skipped(skip.0),
            Err(panic) => Verdict::Failed(said(panic)),
        },
    }
}

/// Runs a check by `run`; and whether it ran on fewer ranks than it asks for.
pub(crate) fn counting(run: impl FnOnce() -> Verdict) -> (Verdict, bool) {
    FEWER_RANKS.set(false);
    (run(), FEWER_RANKS.get())
}

/// How many checks ended in each way.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    passed: usize,
    failed: usize,
    skipped: usize,
    /// Of those that passed or failed, how many ran on fewer ranks than they ask for.
    on_fewer_ranks: usize,
}

impl Tally {
    /// Runs a check by `run`, and counts how it ended.
    fn run(&mut self, run: impl FnOnce() -> Verdict) -> Verdict {
        let (verdict, fewer) = counting(run);
        match verdict {
            Verdict::Passed => self.passed += 1,
            Verdict::Failed(_) => self.failed += 1,
            Verdict::Skipped(_) => self.skipped += 1,
        }
        self.on_fewer_ranks += usize::from(fewer && !matches!(verdict, Verdict::Skipped(_)));
        verdict
    }
}

impl fmt::Display for Tally {
    /// In the words of libtest, to which a skipped test is one that is ignored.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { passed, failed, skipped, on_fewer_ranks } = self;
        let verdict = if *failed == 0 { "ok" } else { "FAILED" };
        write!(f, "{verdict}. {passed} passed; {failed} failed; {skipped} ignored; ")?;
        write!(f, "{on_fewer_ranks} on fewer ranks")
    }
}

/// Runs those of the checks of `suites`, each of which has a name, that the arguments of the process ask
/// for, and says how they ended.
pub fn main(suites: &[(&str, Vec<Check>)]) -> ExitCode {
    main_by(suites, |check| verdict(check.run))
}

/// As [`main`], where each check is run by `run`, which says what a check that fails has not said itself.
pub(crate) fn main_by(
    suites: &[(&str, Vec<Check>)],
    mut run: impl FnMut(&Check) -> Verdict,
) -> ExitCode {
    let asked = Asked::from_arguments(std::env::args().skip(1));
    let all: Vec<_> = suites
        .iter()
        .flat_map(|(suite, checks)| checks.iter().map(move |check| (*suite, check)))
        .map(|(suite, check)| (format!("{suite}::{}", check.name), check))
        .collect();
    let chosen: Vec<_> = all.iter().filter(|(name, _)| asked.for_name(name)).collect();
    if asked.list {
        chosen.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    println!("\nrunning {} tests", chosen.len());
    let (start, mut tally, mut failed) = (Instant::now(), Tally::default(), Vec::new());
    for (name, check) in &chosen {
        let begun = Instant::now();
        let verdict = match tally.run(|| run(check)) {
            Verdict::Passed => "ok",
            Verdict::Skipped(why) => {
                say_skipped(name, &why);
                "ignored"
            }
            Verdict::Failed(_) => {
                failed.push(name);
                "FAILED"
            }
        };
        let seconds = begun.elapsed().as_secs_f64();
        match asked.times {
            true => println!("test {name} ... {verdict} <{seconds:.3}s>"),
            false => println!("test {name} ... {verdict}"),
        }
    }
    failed.iter().for_each(|name| println!("failed: {name}"));
    println!(
        "\ntest result: {tally}; {} filtered out; finished in {:.2}s\n",
        all.len() - chosen.len(),
        start.elapsed().as_secs_f64()
    );
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What the arguments ask for.
#[derive(Debug, Default)]
struct Asked {
    filters: Vec<String>,
    skipped: Vec<String>,
    exact: bool,
    list: bool,
    times: bool,
    nothing: bool,
}

impl Asked {
    fn from_arguments(mut arguments: impl Iterator<Item = String>) -> Self {
        let mut asked = Self::default();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--exact" => asked.exact = true,
                "--list" => asked.list = true,
                "--report-time" => asked.times = true,
                // There is none to be ignored, and no benchmark.
                "--ignored" | "--bench" => asked.nothing = true,
                "--skip" => asked.skipped.extend(arguments.next()),
                "--test-threads" | "--color" | "--format" | "--logfile" | "-Z" => {
                    arguments.next();
                }
                other if other.starts_with('-') => {}
                filter => asked.filters.push(filter.to_owned()),
            }
        }
        asked
    }

    fn for_name(&self, name: &str) -> bool {
        let matches = |filter: &String| match self.exact {
            true => name == filter,
            false => name.contains(filter.as_str()),
        };
        let wanted = self.filters.is_empty() || self.filters.iter().any(matches);
        wanted && !self.nothing && !self.skipped.iter().any(matches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(arguments: &[&str]) -> Vec<&'static str> {
        let asked = Asked::from_arguments(arguments.iter().map(|a| (*a).to_owned()));
        let names = ["a::one", "a::two", "b::one", "b::one_more"];
        names.into_iter().filter(|name| asked.for_name(name)).collect()
    }

    #[test]
    fn a_check_that_is_skipped_has_neither_passed_nor_failed() {
        assert_eq!(verdict(|| {}), Verdict::Passed);
        assert_eq!(verdict(|| skip("no GPU".to_owned())), Verdict::Skipped("no GPU".to_owned()));
        assert_eq!(
            verdict(|| resume_unwind(Box::new("it failed"))),
            Verdict::Failed("it failed".to_owned())
        );
    }

    #[test]
    fn a_tally_has_each_check_once() {
        let mut tally = Tally::default();
        let runs: [fn(); 5] = [
            || {},
            on_fewer_ranks,
            || {
                on_fewer_ranks();
                skip("one GPU".to_owned())
            },
            || skip("no GPU".to_owned()),
            || resume_unwind(Box::new("it failed")),
        ];
        for run in runs {
            tally.run(|| verdict(run));
        }
        let expected = Tally { passed: 2, failed: 1, skipped: 2, on_fewer_ranks: 1 };
        assert_eq!(tally, expected);
        let said = "FAILED. 2 passed; 1 failed; 2 ignored; 1 on fewer ranks";
        assert_eq!(tally.to_string(), said);
    }

    #[test]
    fn a_test_of_libtest_ends_where_its_check_is_skipped() {
        test("skipped", || skip("no GPU".to_owned()));
        let failed = catch_unwind(|| test("failed", || resume_unwind(Box::new("it failed"))));
        assert!(failed.is_err());
    }

    #[test]
    fn filters_are_those_of_cargo_test() {
        assert_eq!(chosen(&[]).len(), 4);
        assert_eq!(chosen(&["one"]), ["a::one", "b::one", "b::one_more"]);
        assert_eq!(chosen(&["b::one", "--exact", "--nocapture"]), ["b::one"]);
        assert_eq!(chosen(&["--test-threads", "2", "--skip", "one"]), ["a::two"]);
        assert_eq!(chosen(&["--skip", "more", "b", "two"]), ["a::two", "b::one"]);
        assert!(chosen(&["--ignored"]).is_empty());
    }
}
