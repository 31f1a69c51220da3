//! Few multiprocessors: what a budget leaves a lane, and work that is taken in larger units there.

use graph_ep::{BodyError, Combine, DispatchError, Lane, Step, StepGraph, StepOptions};

use crate::backend::TestBackend;
use crate::case::{Case, Skew};
use crate::oracle::StepOracle;
use crate::outcome::{RankRun, by_step};
use crate::rig::Rig;

type Queued = Result<(), BodyError>;

/// Calls with budgets that differ between ranks, layers and the calls of a pair.
pub(crate) struct Budgeted<'r, T: TestBackend> {
    pub(crate) rig: &'r Rig<T>,
    pub(crate) layer: usize,
}

impl<T: TestBackend> Budgeted<'_, T> {
    fn lane(&self, call: usize) -> Result<Lane<T::Backend>, BodyError> {
        let multiprocessors = [4, 24, 9][(self.rig.rank() + self.layer + call) % 3];
        Ok(self.rig.program().lane(self.layer)?.with_sm_budget(multiprocessors)?)
    }

    pub(crate) fn dispatch(&self, step: &mut Step<'static, T::Backend>) -> Queued {
        Ok(self.lane(0)?.dispatch(step, &self.rig.program().arguments(self.layer)?)?)
    }

    pub(crate) fn experts(&self, step: &mut Step<'static, T::Backend>) -> Queued {
        self.rig.program().experts(step, self.layer)
    }

    pub(crate) fn combine(&self, step: &mut Step<'static, T::Backend>) -> Queued {
        let memory = self.rig.layer(self.layer);
        let arguments = Combine {
            handle: &memory.handle,
            expert_rows: memory.results.slice(),
            output: memory.output.slice(),
        };
        Ok(self.lane(1)?.combine(step, &arguments)?)
    }
}

/// Many tokens on few multiprocessors, where a warp adds up several pieces of a sum together, and waits for the
/// flags of all of them: how many differs between ranks, and the last unit of a sum has fewer.
pub fn whole_sums_on_few_multiprocessors<T: TestBackend>() {
    let case = Case { hidden: 2056, tokens: vec![768; 3], ..Case::new(3) }.on::<T>();
    let runs = T::on_ranks(case.world(), |env| {
        let rig = std::sync::Arc::new(Rig::<T>::new(env, &case));
        let (dispatcher, stream) = (rig.group.dispatcher(), rig.group.stream());
        let queued = {
            let rig = rig.clone();
            move |step: &mut Step<'static, T::Backend>| {
                let layer = Budgeted { rig: &rig, layer: 0 };
                layer.dispatch(step)?;
                layer.experts(step)?;
                layer.combine(step)
            }
        };
        let graph = StepGraph::record(dispatcher, stream, StepOptions::new(), queued);
        vec![rig.replay(&graph.expect("it can be recorded"), 0)]
    });
    let runs: Vec<Vec<RankRun>> = by_step(&runs);
    StepOracle::new(&case, 0, None).check("one step", &runs[0]);
}

/// A lane with a budget says that it has no more multiprocessors than it is told to use, and no more than the
/// lane has without; another budget takes the place of the first, and none gives all back; fewer than an
/// operation needs are refused. Grids that keep to it are those of unit tests.
pub fn a_lane_says_what_a_budget_leaves_it<T: TestBackend>() {
    let case = Case { lanes: 2, layers: 2, skew: Skew::Rotating, ..Case::new(3) }.on::<T>();
    T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let lane = rig.program().lane(0).expect("it has two");
        let all = lane.sms();
        for (asked, has) in [(4, all.min(4)), (24, all.min(24)), (u32::MAX, all)] {
            let budgeted = lane.with_sm_budget(asked).expect("enough");
            assert_eq!((budgeted.sms(), budgeted.clone().sms()), (has, has));
            for none in [0, u32::MAX] {
                assert_eq!(
                    budgeted.with_sm_budget(none).expect("enough").sms(),
                    all,
                    "not kept on"
                );
            }
        }
        for few in [1, 3] {
            match lane.with_sm_budget(few) {
                Err(DispatchError::Config { field, value, .. }) => {
                    assert_eq!((field, value), ("sm_budget", few.to_string()));
                }
                other => panic!("{other:?}"),
            }
        }
    });
}
