//! Adds up what ranks report, step by step.

use std::collections::BTreeMap;
use std::time::Duration;

use graph_ep::MemoryReport;

use super::Plan;
use super::step::{StepDone, Times as StepTimes};
use crate::args::Mode;
use crate::progress::Progress;
use crate::report::{Memory, Outcome, Overflow, Report, SCHEMA_VERSION, Timing, Timings};

/// The report of a run as far as it has come.
pub(super) struct Collector<'p> {
    plan: &'p Plan,
    progress: &'p Progress,
    /// Steps that not every rank has reported yet.
    waiting: BTreeMap<usize, Vec<StepDone>>,
    report: Report,
    times: Times,
    /// The first step whose record contradicts the routing.
    contradiction: Option<String>,
}

#[derive(Default)]
struct Times {
    clean: Vec<Duration>,
    recovered: Vec<Duration>,
    recording: Vec<Duration>,
    growing: Vec<Duration>,
}

impl<'p> Collector<'p> {
    pub(super) fn new(plan: &'p Plan, progress: &'p Progress, backend: &str) -> Self {
        let args = &plan.args;
        let ranks = args.ranks;
        let initial = plan.initial_capacity as usize;
        let most =
            |bytes: fn(&MemoryReport) -> u64| plan.memory.iter().map(bytes).max().unwrap_or(0);
        let report = Report {
            schema_version: SCHEMA_VERSION,
            outcome: Outcome::Failed,
            failure: None,
            routing: plan.routing.name().to_owned(),
            origin: plan.routing.origin().map(str::to_owned),
            backend: backend.to_owned(),
            ranks,
            experts: plan.routing.experts(),
            top_k: plan.routing.top_k(),
            layers: plan.routing.layers(),
            steps: plan.routing.steps(),
            tokens: plan.routing.tokens(),
            max_tokens_per_rank: plan.shards.max_tokens(),
            hidden: args.hidden,
            dtype: args.dtype,
            seed: args.seed,
            mode: args.mode,
            graph: args.graph,
            growth: args.growth,
            look_ahead: args.look_ahead,
            shrink_after: args.shrink_after,
            capacity_factor: args.capacity_factor,
            alignment: args.alignment,
            initial_capacity_rows: initial,
            final_capacity_rows: vec![initial; ranks],
            peak_required_rows: vec![0; ranks],
            worst_case_rows: plan.worst_case_rows,
            required_rows: Vec::new(),
            capacity_rows: Vec::new(),
            overflowed_steps: Vec::new(),
            overflows: Vec::new(),
            replays: 0,
            growths: 0,
            graph_recordings: vec![0; ranks],
            rounds_per_step: 0,
            dropped_rows: 0,
            recovered_rows: 0,
            verified_values: 0,
            mismatched_values: 0,
            host_syncs_in_clean_steps: 0,
            memory: Memory {
                initial_bytes: most(MemoryReport::budget_bytes),
                final_bytes: most(MemoryReport::budget_bytes),
                worst_case_bytes: most(MemoryReport::worst_case_bytes),
                limit_bytes: args.memory_limit,
            },
            timings_us: Timings::default(),
        };
        Self {
            plan,
            progress,
            waiting: BTreeMap::new(),
            report,
            times: Times::default(),
            contradiction: None,
        }
    }

    /// Takes one rank's word on one step; when it is the last rank's, adds the step up.
    pub(super) fn take(&mut self, done: StepDone) {
        let step = done.step;
        let ranks = self.waiting.entry(step).or_default();
        ranks.push(done);
        if ranks.len() == self.plan.args.ranks {
            let mut ranks = self.waiting.remove(&step).unwrap_or_default();
            ranks.sort_by_key(|done| done.rank);
            self.add(step, &ranks);
        }
    }

    fn add(&mut self, step: usize, ranks: &[StepDone]) {
        let report = &mut self.report;
        // The first run is what the routing met with; all ranks hold the same requirements of it.
        let rows = |rows: u32| rows as usize;
        let required: Vec<usize> = ranks[0].required.iter().copied().map(rows).collect();
        let before: Vec<usize> = ranks.iter().map(|done| rows(done.capacity_before)).collect();
        let after: Vec<usize> = ranks.iter().map(|done| rows(done.capacity_after)).collect();
        if required != self.plan.demand[step] && self.contradiction.is_none() {
            self.contradiction = Some(format!(
                "step {step}: ranks counted {required:?} required rows, but routing requires {:?}",
                self.plan.demand[step]
            ));
        }
        let mut replayed = 0;
        let short = required.iter().zip(&before).any(|(required, had)| required > had);
        let overflowed = short && self.plan.args.mode != Mode::Eager;
        let mut times = StepTimes::default();
        for done in ranks {
            let rank = done.rank;
            report.peak_required_rows[rank] = report.peak_required_rows[rank].max(required[rank]);
            report.graph_recordings[rank] += u64::from(done.recordings);
            report.growths += u64::from(done.growths);
            report.dropped_rows += done.dropped;
            report.recovered_rows += done.recovered;
            report.rounds_per_step = report.rounds_per_step.max(done.windows.into());
            report.verified_values += done.tally.verified;
            report.mismatched_values += done.tally.mismatched;
            report.host_syncs_in_clean_steps += done.clean_syncs;
            replayed = replayed.max(done.replays);
            times = times.longest(done.times);
        }
        if times.recording > Duration::ZERO {
            self.times.recording.push(times.recording);
        }
        if times.growing > Duration::ZERO {
            self.times.growing.push(times.growing);
        }
        if overflowed {
            self.times.recovered.push(times.total);
            report.overflowed_steps.push(step);
            report.replays += u64::from(replayed);
            let overflow = Overflow {
                step,
                required_rows: required.clone(),
                capacity_before: before.clone(),
                capacity_after: after.clone(),
                attempts: replayed,
            };
            self.progress.overflow(&overflow);
            report.overflows.push(overflow);
        } else {
            self.times.clean.push(times.first_run);
        }
        report.required_rows.push(required);
        report.capacity_rows.push(before);
        report.final_capacity_rows = after;
        self.progress.step_done();
    }

    /// The report, with why the run ended early if it did.
    pub(super) fn finish(self, failure: Option<String>, final_bytes: u64) -> Report {
        let Self { mut report, times, contradiction, plan, .. } = self;
        report.timings_us = Timings {
            clean_step: Timing::of(times.clean),
            recovered_step: Timing::of(times.recovered),
            recording: Timing::of(times.recording),
            growing: Timing::of(times.growing),
        };
        report.memory.final_bytes = final_bytes.max(report.memory.initial_bytes);
        let lost = report.dropped_rows > 0 && plan.args.mode != Mode::Drop;
        let lost = lost.then(|| format!("{} rows are missing", report.dropped_rows));
        report.failure = failure.or(contradiction).or(lost);
        report.outcome = match (&report.failure, report.mismatched_values) {
            (Some(_), _) => Outcome::Failed,
            (None, 0) => Outcome::Verified,
            (None, _) => Outcome::Mismatch,
        };
        report
    }
}
