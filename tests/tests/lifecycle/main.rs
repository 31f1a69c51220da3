//! The life of a group of threads on the host.

use graph_ep_tests::lifecycle::Lives;
use graph_ep_tests::{HostThreads, HostThreadsPull};
use proptest::prelude::*;
use proptest_state_machine::prop_state_machine;

prop_state_machine! {
    #![proptest_config(ProptestConfig {
        cases: 120,
        max_shrink_iters: 400,
        ..ProptestConfig::default()
    })]

    /// Whatever happens in whatever order, steps are what the oracle says, and what cannot be is refused.
    #[test]
    fn any_life_is_that_of_the_model(sequential 1..40 => Lives<HostThreads>);

    /// The same where ranks pull.
    #[test]
    fn any_life_that_pulls_is_that_of_the_model(sequential 1..40 => Lives<HostThreadsPull>);
}
