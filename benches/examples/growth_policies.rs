//! What each growth policy would do on recorded routing, as a Markdown table: computed from the
//! routing alone, by the simulation that recovery is tested against.
//!
//! ```text
//! cargo run --release -p graph-ep-benches --example growth_policies [TRACE]
//! ```
//!
//! Without a trace, the one that is built into the program.

use std::num::NonZeroU32;
use std::path::Path;

use graph_ep_cli::demand::{initial_capacity_rows, required_rows, worst_case_rows};
use graph_ep_cli::trace;
use overflow::{Adjustments, GrowthPolicy, Simulation};

const RANKS: usize = 8;
const CAPACITY_FACTOR: f64 = 1.25;
const ALIGNMENT: usize = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let routing = match std::env::args_os().nth(1) {
        Some(path) => trace::load(Path::new(&path))?,
        None => trace::built_in()?,
    };
    let (tokens, top_k) = (routing.tokens(), routing.top_k());
    let too_large = "the routing is too large";
    let initial = initial_capacity_rows(CAPACITY_FACTOR, tokens.div_ceil(RANKS), top_k, ALIGNMENT)
        .ok_or(too_large)?;
    let worst =
        worst_case_rows(tokens, RANKS, routing.experts(), top_k, ALIGNMENT).ok_or(too_large)?;
    let required: Vec<Vec<u32>> = required_rows(&routing, RANKS, ALIGNMENT)
        .into_iter()
        .map(|step| step.into_iter().map(u32::try_from).collect())
        .collect::<Result<_, _>>()?;
    let peak = required.iter().flatten().copied().max().unwrap_or(0);
    let worst_of_all = (RANKS * worst) as f64;

    println!(
        "{}: {} steps of {tokens} tokens over {RANKS} ranks; initial capacity {initial} rows a \
         rank, global peak {peak}, worst case {worst}.\n",
        routing.name(),
        routing.steps(),
    );
    println!(
        "| growth | between steps | steps replayed | growths | rows reserved | of worst case |"
    );
    println!("|---|---|--:|--:|--:|--:|");
    let (nothing, ahead) = (Adjustments::default(), Some(1.25));
    let looking = Adjustments { look_ahead: ahead, ..nothing };
    let shrinking = Adjustments { shrink_after: NonZeroU32::new(4), ..nothing };
    for (policy, adjustments, between) in [
        (GrowthPolicy::Exact, nothing, "nothing"),
        (GrowthPolicy::geometric(), nothing, "nothing"),
        (GrowthPolicy::headroom(), nothing, "nothing"),
        (GrowthPolicy::Exact, looking, "look ahead × 1.25"),
        (GrowthPolicy::headroom(), shrinking, "shrink after 4 steps"),
    ] {
        let simulation = Simulation {
            policy,
            adjustments,
            initial_capacity: u32::try_from(initial)?,
            alignment: u32::try_from(ALIGNMENT)?,
            limit_rows: u32::try_from(worst)?,
        };
        let outcome = simulation.run(&required)?;
        println!(
            "| {policy} | {between} | {} | {} | {} | {:.1} % |",
            outcome.replays,
            outcome.total_growths(),
            outcome.reserved_rows,
            outcome.reserved_rows as f64 * 100.0 / worst_of_all,
        );
    }
    Ok(())
}
