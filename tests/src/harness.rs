//! A harness that runs checks one after the other on the only thread of its process, which may
//! therefore be forked. It takes the arguments that `cargo test` passes on: filters, `--exact`,
//! `--skip`, `--list`, `--report-time`; others are accepted and change nothing.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::ExitCode;
use std::time::Instant;

use crate::backend::say_skipped;

/// A check with a name.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// The theme and the check.
    pub name: &'static str,
    /// Panics where something is wrong.
    pub run: fn(),
}

/// How a check ended.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Passed,
    Skipped(String),
    Failed,
}

/// What unwinds from a check that is skipped.
struct Skip(String);

/// Ends the check that runs, since the machine lacks what the rest of it needs: neither passed nor
/// failed. To be called on the harness's thread.
pub fn skip(why: String) -> ! {
    // Not a panic, whose message would be printed.
    resume_unwind(Box::new(Skip(why)))
}

fn verdict(run: fn()) -> Verdict {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(()) => Verdict::Passed,
        Err(payload) => match payload.downcast::<Skip>() {
            Ok(skip) => Verdict::Skipped(skip.0),
            Err(_) => Verdict::Failed,
        },
    }
}

/// Runs those of `checks` that the arguments of the process ask for, and says how they ended.
pub fn main(suite: &str, checks: &[Check]) -> ExitCode {
    let asked = Asked::from_arguments(std::env::args().skip(1));
    let named = checks.iter().map(|check| (format!("{suite}::{}", check.name), check));
    let chosen: Vec<_> = named.filter(|(name, _)| asked.for_name(name)).collect();
    if asked.list {
        chosen.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    println!("\nrunning {} tests", chosen.len());
    let (start, mut failed, mut skipped) = (Instant::now(), Vec::new(), 0);
    for (name, check) in &chosen {
        let begun = Instant::now();
        let verdict = match verdict(check.run) {
            Verdict::Passed => "ok",
            Verdict::Skipped(why) => {
                say_skipped(name, &why);
                skipped += 1;
                "ignored"
            }
            Verdict::Failed => {
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
    let verdict = if failed.is_empty() { "ok" } else { "FAILED" };
    failed.iter().for_each(|name| println!("failed: {name}"));
    println!(
        "\ntest result: {verdict}. {} passed; {} failed; {skipped} ignored; 0 measured; {} filtered out; \
         finished in {:.2}s\n",
        chosen.len() - failed.len() - skipped,
        failed.len(),
        checks.len() - chosen.len(),
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
        assert_eq!(verdict(|| resume_unwind(Box::new("it failed"))), Verdict::Failed);
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
