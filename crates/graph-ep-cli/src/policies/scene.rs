//! What a policy is faced with: requirements of a routing over a number of ranks.

use graph_ep::overflow::Simulation;
use graph_ep::{Adjustments, GrowthPolicy};

use super::{PoliciesArgs, PoliciesError};
use crate::demand::{initial_capacity_rows, required_rows, worst_case_rows};
use crate::routing::Routing;
use crate::trace;
use crate::workload::{Workload, WorkloadConfig};
use clap::ValueEnum;

/// One routing, of one seed, over some ranks.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Scene {
    pub(super) routing: String,
    pub(super) ranks: usize,
    /// `[step][rank]`: padded rows of the worst layer.
    pub(super) required: Vec<Vec<u32>>,
    /// Rows of every rank at the start.
    pub(super) initial: u32,
    /// The most that any routing of as many tokens could require of a rank.
    pub(super) worst_case: u32,
    pub(super) alignment: u32,
}

impl Scene {
    /// `routing` over `ranks` ranks.
    pub(super) fn new(
        routing: &Routing,
        ranks: usize,
        args: &PoliciesArgs,
    ) -> Result<Self, PoliciesError> {
        let shards = routing.shards(ranks).map_err(|source| PoliciesError::Routing {
            routing: routing.name().to_owned(),
            ranks,
            source,
        })?;
        let (top_k, alignment) = (routing.top_k(), args.alignment);
        let too_large = || PoliciesError::TooLarge { routing: routing.name().to_owned(), ranks };
        let rows = |rows: Option<usize>| {
            rows.and_then(|rows| u32::try_from(rows).ok()).ok_or_else(too_large)
        };
        let worst = worst_case_rows(routing.tokens(), ranks, routing.experts(), top_k, alignment);
        let initial =
            initial_capacity_rows(args.capacity_factor, shards.max_tokens(), top_k, alignment);
        let required = required_rows(routing, ranks, alignment);
        Ok(Self {
            routing: routing.name().to_owned(),
            ranks,
            // No requirement exceeds the worst case, which fits.
            required: required
                .into_iter()
                .map(|step| step.into_iter().map(|rows| rows as u32).collect())
                .collect(),
            initial: rows(initial)?,
            worst_case: rows(worst)?,
            alignment: alignment as u32,
        })
    }

    /// What a policy would do.
    pub(super) fn simulation(&self, policy: GrowthPolicy, adjustments: Adjustments) -> Simulation {
        Simulation {
            policy,
            adjustments,
            initial_capacity: self.initial,
            alignment: self.alignment,
            // A capacity factor may ask for more than the worst case.
            limit_rows: self.worst_case.max(self.initial),
        }
    }

    /// The most that each rank requires in any step.
    pub(super) fn peaks(&self) -> Vec<u32> {
        let of = |rank| self.required.iter().map(|step| step[rank]).max().unwrap_or(0);
        (0..self.ranks).map(of).collect()
    }
}

/// All scenes that `args` ask for: those of a routing and number of ranks, one for each seed, behind
/// each other.
pub(super) fn all(args: &PoliciesArgs) -> Result<Vec<Scene>, PoliciesError> {
    let mut scenes = Vec::new();
    let everything = args.trace.is_empty() && args.workload.is_empty();
    let mut traces = Vec::new();
    if everything {
        traces.push(trace::built_in()?);
    }
    for path in &args.trace {
        traces.push(trace::load(path)?);
    }
    let workloads =
        if everything { Workload::value_variants().to_vec() } else { args.workload.clone() };
    for ranks in &args.ranks {
        for trace in &traces {
            scenes.push(Scene::new(trace, *ranks, args)?);
        }
        for workload in &workloads {
            for seed in &args.seeds {
                let config = WorkloadConfig::new(*workload, *seed, *ranks).steps(args.steps);
                let routing = config.generate().map_err(|source| PoliciesError::Routing {
                    routing: workload.name(),
                    ranks: *ranks,
                    source,
                })?;
                scenes.push(Scene::new(&routing, *ranks, args)?);
            }
        }
    }
    Ok(scenes)
}

#[cfg(test)]
mod tests {
    use super::super::args::tests::parse;
    use super::*;

    #[test]
    fn the_built_in_trace_and_every_workload_are_there_for_every_number_of_ranks() {
        let scenes = all(&parse("--ranks 2,4 --steps 3 --seeds 5,6").unwrap()).unwrap();
        assert_eq!(scenes.len(), 2 * (1 + 2 * Workload::value_variants().len()));
        assert!(scenes.iter().all(|scene| scene.required[0].len() == scene.ranks));
        assert_eq!(
            (scenes[0].routing.as_str(), scenes[0].required.len()),
            (trace::BUILT_IN_NAME, 64)
        );
        assert_eq!(scenes[1].required.len(), 3);
        assert_ne!(scenes[1].required, scenes[2].required);
    }

    #[test]
    fn what_was_asked_for_is_all_there_is() {
        let scenes = all(&parse("--workload burst --ranks 8 --seeds 0").unwrap()).unwrap();
        assert_eq!(scenes.len(), 1);
        assert_eq!((scenes[0].initial, scenes[0].worst_case), (640, 4208));
        let refused = all(&parse("--workload burst --ranks 65").unwrap()).unwrap_err();
        assert!(refused.to_string().contains("65"), "{refused}");
    }
}
