use std::thread;

use graph_ep::{HostBackend, ThreadGroup};

use super::super::tests::setup;
use super::*;
use crate::bench::cases::tests::shape;
use crate::bench::cases::{Kernels, Measured};
use crate::bench::inputs::Given;

/// A library that copies: the ranks are threads of this process, and reach each other's memory.
struct Copies {
    context: EpContext<HostBackend>,
    /// Whether it also moves what it receives, as it should.
    delivers: bool,
}

impl Rival<HostBackend> for Copies {
    unsafe fn exchange(
        &self,
        stream: &<HostBackend as Backend>::Stream,
        sends: &[SendTo],
        receives: &[ReceiveFrom],
    ) -> Result<(), NcclError> {
        let deadline = std::time::Duration::from_secs(30);
        let rank = self.context.rank();
        let words: Vec<u64> =
            sends.iter().flat_map(|send| [u64::from(send.peer.0), send.address]).collect();
        let rendezvous = self.context.rendezvous();
        let all = rendezvous.all_gather("sends", bytemuck::cast_slice(&words), deadline).unwrap();
        for receive in receives {
            let theirs: Vec<u64> = all[receive.peer.index()]
                .chunks_exact(8)
                .map(bytemuck::pod_read_unaligned::<u64>)
                .collect();
            let to_us = theirs.chunks(2).find(|words| words[0] == u64::from(rank.0)).unwrap();
            if self.delivers && receive.bytes > 0 {
                // SAFETY: buffers of this process that live to the end of the test; what is sent is
                // written before the ranks meet and never again.
                unsafe {
                    let (to, from) = (receive.address, to_us[1]);
                    self.context.backend().copy(stream, to, from, receive.bytes, &[])?;
                }
            }
        }
        Ok(())
    }

    fn leave(self: Box<Self>) -> Result<(), NcclError> {
        Ok(())
    }
}

fn measured(join: Join<HostBackend>) -> Vec<Vec<Entry>> {
    let shape = shape();
    let ranks = shape.ranks;
    let setup = setup(ranks, 1 << 16);
    let measured = Measured {
        shape,
        ops: vec![Op::Dispatch, Op::Combine, Op::Pair],
        layers: 2,
        step_layers: 0,
        against: true,
        kernels: Kernels::Counting,
    };
    let given = Given::new(&shape, 2, 1);
    thread::scope(|scope| {
        let places = ThreadGroup::new(ranks).expect("a group").into_iter();
        let threads: Vec<_> = places
            .map(|place| {
                let (setup, measured, given) = (&setup, &measured, &given);
                scope.spawn(move || {
                    let group =
                        shape.group().build(HostBackend::default(), place).expect("a group");
                    let part = Part::new(group, measured, given, setup).expect("a part");
                    super::measure(&part, &measured.ops, join).expect("measured")
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    })
}

#[test]
fn the_same_bytes_are_moved_and_checked() {
    let ranks =
        measured(|context| Ok(Box::new(Copies { context: context.clone(), delivers: true })));
    for entries in ranks {
        let ops: Vec<_> = entries.iter().map(|entry| (entry.case.op, entry.case.by)).collect();
        assert_eq!(ops, [Op::Dispatch, Op::Combine, Op::Pair].map(|op| (op, By::Nccl)));
        assert!(entries.iter().all(|entry| entry.verified && entry.case.captured), "{entries:?}");
        let counts = Given::new(&shape(), 2, 1).inputs;
        let crossing: u64 = (0..2)
            .map(|layer| counts.counts(0, layer))
            .map(|counts| counts.items(0, 1).max(counts.items(1, 0)) as u64 * 32)
            .sum();
        assert_eq!(entries[0].work.wire_bytes, crossing / 2);
        assert_eq!(entries[0].work.memory_bytes, 0);
    }
}

#[test]
fn bytes_that_do_not_come_are_missed() {
    let ranks =
        measured(|context| Ok(Box::new(Copies { context: context.clone(), delivers: false })));
    assert!(ranks.iter().flatten().all(|entry| !entry.verified));
}
