//! What a policy is faced with: requirements of a routing over a number of ranks.

use std::collections::BTreeSet;
use std::fmt::Display;

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
    /// `routing`, which is called `name`, over `ranks` ranks.
    fn new(
        name: &str,
        routing: &Routing,
        ranks: usize,
        args: &PoliciesArgs,
    ) -> Result<Self, PoliciesError> {
        let shards = routing.shards(ranks).map_err(|source| PoliciesError::Routing {
            routing: name.to_owned(),
            ranks,
            source,
        })?;
        let (top_k, alignment) = (routing.top_k(), args.alignment);
        let too_large = || PoliciesError::TooLarge { routing: name.to_owned(), ranks };
        let rows = |rows: Option<usize>| {
            rows.and_then(|rows| u32::try_from(rows).ok()).ok_or_else(too_large)
        };
        let worst = worst_case_rows(routing.tokens(), ranks, routing.experts(), top_k, alignment);
        let initial =
            initial_capacity_rows(args.capacity_factor, shards.max_tokens(), top_k, alignment);
        let worst_case = rows(worst)?;
        let required = required_rows(routing, ranks, alignment);
        Ok(Self {
            routing: name.to_owned(),
            ranks,
            // No requirement exceeds the worst case, which fits.
            required: required
                .into_iter()
                .map(|step| step.into_iter().map(|rows| rows as u32).collect())
                .collect(),
            initial: rows(initial)?.min(worst_case),
            worst_case,
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
            limit_rows: self.worst_case,
        }
    }

    /// The most that each rank requires in any step.
    pub(super) fn peaks(&self) -> Vec<u32> {
        let of = |rank| self.required.iter().map(|step| step[rank]).max().unwrap_or(0);
        (0..self.ranks).map(of).collect()
    }
}

/// All scenes that `args` ask for: those of a routing and number of ranks, one for each seed, behind
/// each other. No two routings have the same name.
pub(super) fn all(args: &PoliciesArgs) -> Result<Vec<Scene>, PoliciesError> {
    let mut scenes = Vec::new();
    let everything = args.trace.is_empty() && args.workload.is_empty();
    let workloads =
        if everything { Workload::value_variants().to_vec() } else { args.workload.clone() };
    let mut traces = Vec::new();
    if everything {
        traces.push((trace::BUILT_IN_NAME.to_owned(), trace::built_in()?));
    }
    for path in &args.trace {
        let routing = trace::load(path)?;
        traces.push((routing.name().to_owned(), routing));
    }
    let made: Vec<String> = workloads.iter().map(|workload| workload.name()).collect();
    let mut names: Vec<String> = traces.iter().map(|(name, _)| name.clone()).collect();
    names.extend(made.iter().cloned());
    // Files of one name in two folders, or of a workload's, are told apart by their places in the list.
    for (place, (name, _)) in (1..).zip(&mut traces) {
        if names.iter().filter(|other| *other == name).count() > 1 {
            *name = format!("{place}:{name}");
        }
    }
    once("--trace", args.trace.iter().map(|path| path.display().to_string()))?;
    once("the routing", traces.iter().map(|(name, _)| name).chain(&made))?;
    once("--ranks", &args.ranks)?;
    once("--seeds", &args.seeds)?;
    for ranks in &args.ranks {
        for (name, routing) in &traces {
            scenes.push(Scene::new(name, routing, *ranks, args)?);
        }
        for (workload, name) in workloads.iter().zip(&made) {
            for seed in &args.seeds {
                let config = WorkloadConfig::new(*workload, *seed, *ranks).steps(args.steps);
                let routing = config.generate().map_err(|source| PoliciesError::Routing {
                    routing: name.clone(),
                    ranks: *ranks,
                    source,
                })?;
                scenes.push(Scene::new(name, &routing, *ranks, args)?);
            }
        }
    }
    Ok(scenes)
}

/// Refuses what is there twice.
fn once<T: Ord + Display>(
    what: &'static str,
    values: impl IntoIterator<Item = T>,
) -> Result<(), PoliciesError> {
    let mut seen = BTreeSet::new();
    for value in values {
        let text = value.to_string();
        if !seen.insert(value) {
            return Err(PoliciesError::Twice { what, value: text });
        }
    }
    Ok(())
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

    #[test]
    fn what_is_named_twice_is_refused() {
        for line in ["--ranks 8,8", "--seeds 1,0,1", "--workload burst,burst"] {
            let refused = all(&parse(line).unwrap()).unwrap_err();
            assert!(matches!(refused, PoliciesError::Twice { .. }), "{line}: {refused}");
        }
    }

    #[test]
    fn traces_of_one_name_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let header = "{\"__metadata__\":{\"experts\":\"8\"},\"topk_idx\":{\"dtype\":\"U8\",\
                      \"shape\":[1,1,2,2],\"data_offsets\":[0,4]}}";
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend([0, 1, 2, 7]);
        std::fs::create_dir(path("other")).unwrap();
        let files = ["a", "other/a", "burst", "b"].map(|name| path(&format!("{name}.safetensors")));
        for name in &files {
            std::fs::write(name, &file).unwrap();
        }
        let line =
            format!("--ranks 2 --seeds 0 --steps 1 --workload burst --trace {}", files.join(","));
        let scenes = all(&parse(&line).unwrap()).unwrap();
        let names: Vec<_> = scenes.iter().map(|scene| scene.routing.as_str()).collect();
        assert_eq!(names, ["1:a", "2:a", "3:burst", "b", "burst"]);

        let refused = all(&parse(&format!("--trace {0},{0}", files[3])).unwrap()).unwrap_err();
        assert_eq!(refused.to_string(), format!("--trace {} is named twice", files[3]));
    }
}
