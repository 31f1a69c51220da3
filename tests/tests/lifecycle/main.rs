//! The life of a group of threads on the host.

use graph_ep_tests::HostThreads;
use graph_ep_tests::lifecycle::Lives;
use proptest::prelude::*;
use proptest_state_machine::prop_state_machine;

prop_state_machine! {
    #![proptest_config(ProptestConfig {
        cases: 160,
        max_shrink_iters: 400,
        ..ProptestConfig::default()
    })]

    /// Whatever happens in whatever order, steps are what the oracle says, and what cannot be is refused.
    #[test]
    fn any_life_is_that_of_the_model(sequential 1..40 => Lives<HostThreads>);
}
