//! Every mode gives what the oracle says, and so the same bits.

use crate::backend::TestBackend;
use crate::case::{Case, Skew};
use crate::oracle::StepOracle;
use crate::rig::Rig;

/// Eager steps give what the oracle says, whatever the capacity was before.
pub fn eager_equals_the_oracle<T: TestBackend>() {
    let case = Case { skew: Skew::Hot(0), layers: 2, ..Case::new(3) }.capacity(4);
    let runs = T::on_ranks(3, |env| {
        let rig = Rig::<T>::new(env, &case);
        (0..3).map(|step| rig.run_eager(step)).collect::<Vec<_>>()
    });
    for step in 0..3 {
        let of_step: Vec<_> = runs.iter().map(|rank| rank[step].clone()).collect();
        StepOracle::new(&case, step, None).check(&format!("step {step}"), &of_step);
    }
}
