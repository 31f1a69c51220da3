//! Lanes: two in turn, two at once, and what a lane refuses.

use graph_ep::{
    CaptureError, Combine, DispatchConfig, DispatchError, ExpertMap, Handle, StepGraph, StepMode,
    StepOptions, TokenDispatcher,
};

use crate::backend::TestBackend;
use crate::case::{Case, Order, Skew};
use crate::oracle::StepOracle;
use crate::outcome::by_step;
use crate::program::Program;
use crate::rig::Rig;

fn two_lanes(order: Order) -> Case {
    Case { lanes: 2, layers: 2, order, skew: Skew::Rotating, ..Case::new(3) }
}

/// Runs steps of `case` directly and from a graph, within `rows` rows, and holds them to the oracle.
fn conforms<T: TestBackend>(case: &Case, rows: u32) {
    let case = case.clone().on::<T>().capacity(rows);
    let runs = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let graph = rig.record(StepOptions::new()).expect("it can be recorded");
        let mut runs = Vec::new();
        for step in 0..3 {
            runs.push(rig.run(2 * step, StepMode::Static));
            runs.push(rig.replay(&graph, 2 * step + 1));
        }
        runs
    });
    let capacity = vec![rows; case.world()];
    for (step, runs) in by_step(&runs).iter().enumerate() {
        let oracle = StepOracle::new(&case, step, Some(&capacity));
        oracle.check(&format!("{:?}, {rows} rows, step {step}", case.order), runs);
    }
}

/// Layers that take lanes in turn; more layers than lanes.
pub fn two_lanes_in_turn<T: TestBackend>() {
    let case = Case { layers: 3, ..two_lanes(Order::Alternate) };
    conforms::<T>(&case, 128);
    conforms::<T>(&case, 8);
}

/// Dispatch on lane 0, dispatch on lane 1, combine on lane 1, combine on lane 0.
pub fn two_lanes_at_once<T: TestBackend>() {
    conforms::<T>(&two_lanes(Order::Nested), 128);
    conforms::<T>(&two_lanes(Order::Nested), 8);
    conforms::<T>(&Case { staging: true, ..two_lanes(Order::Nested) }, 128);
}

/// The error of a step whose body is `body`, which is recorded and so never runs.
pub(super) fn refusal<T: TestBackend>(
    rig: &Rig<T>,
    body: impl FnOnce(
        &Program<T>,
        &mut graph_ep::Step<'static, T::Backend>,
    ) -> Result<(), graph_ep::BodyError>,
) -> Option<String> {
    let program = rig.program();
    let dispatcher = rig.group.dispatcher();
    let recorded = StepGraph::record(dispatcher, rig.group.stream(), StepOptions::new(), |step| {
        body(&program, step)
    });
    match recorded {
        Ok(_) => None,
        Err(CaptureError::Body { source, .. }) => match source.downcast_ref::<DispatchError>() {
            Some(DispatchError::Order { rank, reason, .. }) => {
                assert_eq!(*rank, rig.group.context().rank());
                Some(reason.clone())
            }
            Some(DispatchError::Argument { rank, argument, .. }) => {
                assert_eq!(*rank, rig.group.context().rank());
                Some((*argument).to_owned())
            }
            _ => panic!("{source:?}"),
        },
        // The end of the step, which comes behind the body.
        Err(CaptureError::Dispatch(DispatchError::Order { reason, .. })) => Some(reason),
        Err(other) => panic!("{other:?}"),
    }
}

/// What `body` finds in a step that is recorded and given up, so that what is wrongly accepted never runs;
/// nothing if it is refused what it does before.
pub(super) fn looked_at<T: TestBackend, V>(
    rig: &Rig<T>,
    body: impl FnOnce(
        &Program<T>,
        &mut graph_ep::Step<'static, T::Backend>,
    ) -> Result<V, graph_ep::BodyError>,
) -> Option<V> {
    let (program, dispatcher) = (rig.program(), rig.group.dispatcher());
    let mut found = None;
    let _: Result<_, _> =
        StepGraph::record(dispatcher, rig.group.stream(), StepOptions::new(), |step| {
            found = Some(body(&program, step)?);
            Err("only looked at".into())
        });
    found
}

/// A second dispatch on a lane whose first has not been combined is refused, by the name of the lane.
pub fn a_second_dispatch_on_an_open_lane_is_refused<T: TestBackend>() {
    let case = Case { lanes: 1, layers: 2, ..Case::new(2) };
    T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let reason = refusal(&rig, |program, step| {
            program.dispatch(step, 0)?;
            program.dispatch(step, 1)
        });
        assert!(reason.is_some_and(|text| text.contains("lane 0")), "not refused");
    });
}

/// A combine is refused where nothing is open: at the start, a second time, on another lane, with
/// another handle.
pub fn a_combine_without_its_dispatch_is_refused<T: TestBackend>() {
    let case = two_lanes(Order::Alternate).on::<T>();
    T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let nothing_open = refusal(&rig, |program, step| program.combine(step, 0));
        assert!(nothing_open.is_some(), "nothing was dispatched");
        let twice = refusal(&rig, |program, step| {
            program.dispatch(step, 0)?;
            program.combine(step, 0)?;
            program.combine(step, 0)
        });
        assert!(twice.is_some(), "it was combined before");
        for (lane, handle) in [(1, 0), (0, 1)] {
            let crossed = refusal(&rig, |program, step| {
                program.dispatch(step, 0)?;
                let arguments = Combine {
                    handle: &rig.layer(handle).handle,
                    expert_rows: rig.layer(0).results.slice(),
                    output: rig.layer(0).output.slice(),
                };
                Ok(program.lane(lane)?.combine(step, &arguments)?)
            });
            assert!(crossed.is_some(), "lane {lane} with handle {handle}");
        }
    });
}

/// A handle whose dispatch has not been combined cannot be filled by another lane: the combine of the
/// first would follow the lists of the second.
pub fn an_open_handle_cannot_be_filled_again<T: TestBackend>() {
    let case = two_lanes(Order::Nested).on::<T>();
    T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let reason = refusal(&rig, |program, step| {
            program.dispatch(step, 0)?;
            let mut arguments = program.arguments(1)?;
            arguments.handle = &rig.layer(0).handle;
            Ok(program.lane(1)?.dispatch(step, &arguments)?)
        });
        assert!(reason.is_some(), "a handle was filled twice");
    });
}

/// A handle that was made for another dispatcher is refused: it has lists for other sizes, and the
/// route would write behind their ends.
pub fn a_handle_of_another_dispatcher_is_refused<T: TestBackend>() {
    let case = Case { tokens: vec![64; 2], ..Case::new(2) };
    T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let map = ExpertMap::contiguous(case.experts, 2).expect("two ranks");
        let config = DispatchConfig::builder(case.hidden, case.top_k, 1, map).build();
        let small = TokenDispatcher::new(rig.group.context(), config.expect("in range"));
        let small = small.expect("the same on both ranks");
        let handle = Handle::new(&small, rig.group.rows()).expect("memory");
        let accepted = looked_at(&rig, |program, step| {
            let mut arguments = program.arguments(0)?;
            arguments.handle = &handle;
            Ok(program.lane(0)?.dispatch(step, &arguments).is_ok())
        });
        assert_eq!(accepted, Some(false), "a handle for one token was accepted for 64");
    });
}

/// A lane of another dispatcher is refused: its step counts elsewhere.
pub fn a_lane_of_another_dispatcher_is_refused<T: TestBackend>() {
    let case = Case::new(2);
    T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let config = rig.group.dispatcher().config().clone();
        let other = TokenDispatcher::new(rig.group.context(), config).expect("the same");
        let accepted = looked_at(&rig, |program, step| {
            let lane = other.lane(0).ok_or("it has one")?;
            Ok(lane.dispatch(step, &program.arguments(0)?).is_ok())
        });
        assert_eq!(accepted, Some(false), "a lane of another dispatcher was accepted");
    });
}

/// A step that ends in a dispatch gives every rank the same verdict, with room and without.
pub fn a_step_that_ends_in_a_dispatch_has_one_verdict<T: TestBackend>() {
    for layers in [1, 2] {
        let case = Case { ends_in_dispatch: true, layers, ..two_lanes(Order::Alternate) };
        conforms::<T>(&case, 128);
        conforms::<T>(&case, 8);
    }
}

/// A lane whose last step ended in a dispatch serves steps that combine, and the other way round, as
/// often as one likes.
pub fn a_lane_serves_steps_with_and_without_combine<T: TestBackend>() {
    let whole = Case { layers: 2, ..Case::new(3) }.on::<T>();
    let open = Case { ends_in_dispatch: true, ..whole.clone() };
    let runs = T::on_ranks(whole.world(), |env| {
        let builder = whole.builder(env.rank());
        let group = env.build(&builder).expect("the group is built");
        let rigs = [&whole, &open].map(|case| Rig::<T>::on(group.clone(), case).expect("memory"));
        let graphs = rigs.each_ref().map(|rig| rig.record(StepOptions::new()).expect("recorded"));
        rigs[0].meet("the memory of both is there");
        (0..9)
            .map(|step| {
                // 0 1 0 0 1 1 0 1 0
                let which = [0, 1, 0, 0, 1, 1, 0, 1, 0][step];
                match step % 2 {
                    0 => rigs[which].replay(&graphs[which], step),
                    _ => rigs[which].run(step, StepMode::Static),
                }
            })
            .collect::<Vec<_>>()
    });
    let capacity = vec![whole.worst_case(); whole.world()];
    for (step, runs) in by_step(&runs).iter().enumerate() {
        let case = if [1, 4, 5, 7].contains(&step) { &open } else { &whole };
        StepOracle::new(case, step, Some(&capacity)).check(&format!("step {step}"), runs);
    }
}
