//! The operations of a step and their bodies on the host backend.
//!
//! In stream order: [`StepBegin`], then for each pair [`Route`], [`Count`], [`Window`], [`Gather`],
//! the caller's experts, [`ReducePush`], [`Fold`] and [`Reduce`], and at last [`Acknowledge`] where a dispatch
//! was left open, and [`StepEnd`]. Every one of them first looks for a fault and does nothing if
//! there is one: peers learn of it by the poison word, so nothing has to be signalled any more.
//!
//! Where rows are pushed and the host need not look, a pair is two operations, [`PushDispatch`] and
//! [`PushCombine`], each of which sends and receives at the same time. They hold all of a device, or of
//! the part of it that they are given.
//!
//! [`Count`], [`Fold`], [`Acquire`] and [`Acknowledge`] wait for peers and move nothing; what moves
//! rows never waits. So a wait holds one block of a device, and ranks that share a device cannot keep
//! each other from being scheduled.
//!
//! A body reads what a peer wrote only after it acquired that peer's signal, or after an earlier
//! operation of the same stream did.

mod backward;
mod count;
#[cfg(test)]
mod device;
mod fold;
mod gather;
#[cfg(test)]
mod limits;
mod memory;
mod push;
mod received;
mod reduce;
mod reduce_push;
mod route;
mod step;
mod window;

pub(crate) use backward::{Acquire, PushWeightGrads, Regather, Restage};
pub(crate) use count::Count;
pub(crate) use fold::{Acknowledge, Fold};
pub(crate) use gather::Gather;
pub(crate) use push::{MOST_RANKS, MOST_TOKENS, PushCombine, PushDispatch, WARP_LANES};
pub(crate) use reduce::Reduce;
pub(crate) use reduce_push::ReducePush;
pub(crate) use route::Route;
pub(crate) use step::{Abandon, Resume, StepBegin, StepEnd};
pub(crate) use window::Window;

/// The device body of a kernel: one file, and every header.
const fn source((file, text): graph_ep_kernels::Text) -> ep_context::KernelSource {
    ep_context::KernelSource { file, text, headers: graph_ep_kernels::HEADERS }
}
