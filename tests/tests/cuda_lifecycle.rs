//! The life of a group of threads on the GPUs of this machine; says that it is skipped where there is
//! none.
//!
//! A group takes its time to be made on a GPU, so there are fewer and shorter lives than on the host.

use graph_ep_tests::backend::say_skipped;
use graph_ep_tests::lifecycle::Lives;
use graph_ep_tests::{CudaThreads, CudaThreadsPush, TestBackend};
use proptest::prelude::*;
use proptest_state_machine::prop_state_machine;

prop_state_machine! {
    #![proptest_config(ProptestConfig {
        cases: 16,
        max_shrink_iters: 40,
        // It runs where its sources are not, and says which life it was that failed.
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    fn lives(sequential 1..24 => Lives<CudaThreads>);

    fn lives_that_push(sequential 1..24 => Lives<CudaThreadsPush>);
}

/// Whatever happens in whatever order, steps are what the oracle says, and what cannot be is refused.
#[test]
fn any_life_is_that_of_the_model() {
    match CudaThreads::missing() {
        Some(why) => say_skipped("any_life_is_that_of_the_model", &why),
        None => lives(),
    }
}

/// The same where ranks push on parts of a GPU too.
#[test]
fn any_life_that_pushes_is_that_of_the_model() {
    match CudaThreadsPush::missing() {
        Some(why) => say_skipped("any_life_that_pushes_is_that_of_the_model", &why),
        None => lives_that_push(),
    }
}
