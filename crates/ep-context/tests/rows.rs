//! Rows that grow, as safe code sees them: no call reaches addresses behind which there is no memory.

use ep_context::rendezvous::ThreadGroup;
use ep_context::{BackendError, DeviceSlice, EpContext, HostBackend, Queue, RowBuffer, RowSet};

type Stream = <HostBackend as ep_context::Backend>::Stream;

/// More than a page.
const ROW: usize = 1 << 16;

/// A set of one row that may become a million, and its stream.
struct Rig {
    context: EpContext<HostBackend>,
    stream: Stream,
    set: RowSet<HostBackend>,
    rows: RowBuffer<HostBackend>,
}

impl Rig {
    fn new() -> Self {
        let alone = ThreadGroup::new(1).expect("a group").into_iter().next().expect("one rank");
        let context =
            EpContext::builder(HostBackend::default(), alone).build().expect("a group of one");
        let stream = context.stream("test").expect("threads are left");
        let set = RowSet::new(&context, &stream, "rows", 1, 1 << 20).expect("memory");
        let rows = set.add("rows", ROW).expect("memory");
        Self { context, stream, set, rows }
    }

    fn queue(&self) -> Queue<'static, HostBackend> {
        Queue::direct(self.context.backend(), &self.stream)
    }

    /// Downloads so many bytes.
    fn read(&self, from: &DeviceSlice<'static, HostBackend>, bytes: usize) -> Option<()> {
        // SAFETY: all work is queued on this stream.
        refused(unsafe { self.queue().download(from, &mut vec![0; bytes]) })
    }

    fn commit(&self, rows: u32) {
        let plan = self.set.plan(rows).expect("reserved");
        // SAFETY: nothing but the host looks at the capacity.
        unsafe { plan.commit(&self.queue()) }.expect("the stream runs");
    }
}

/// Whether it was done; `None` if it was refused as too long.
fn refused(outcome: Result<(), BackendError>) -> Option<()> {
    match outcome {
        Ok(()) => Some(()),
        Err(BackendError::Invalid { .. }) => None,
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn only_rows_with_memory_are_read_and_written() {
    let rig = Rig::new();
    let all = rig.rows.slice();
    assert_eq!((all.bytes(), all.held()), (ROW << 20, ROW));
    assert_eq!(rig.read(&all, ROW), Some(()));
    assert_eq!(rig.read(&all, ROW + 1), None);
    let other = rig.context.allocate("other", 2 * ROW).expect("memory").slice();
    let queue = rig.queue();
    // SAFETY: both are used on this stream only, and are different memory.
    unsafe {
        assert_eq!(refused(queue.upload(&all, &vec![7; ROW])), Some(()));
        assert_eq!(refused(queue.upload(&all, &vec![7; ROW + 1])), None);
        assert_eq!(refused(queue.copy(&all, &other)), None, "into rows without memory");
        assert_eq!(refused(queue.copy(&other, &all)), None, "a longer source");
        let two = all.get(0..2 * ROW).expect("reserved");
        assert_eq!(refused(queue.copy(&other, &two)), None, "from rows without memory");
        let one = all.get(0..ROW).expect("reserved");
        assert_eq!(refused(queue.copy(&other, &one)), Some(()));
    }
    let half = all.get(ROW / 2..2 * ROW).expect("reserved");
    assert_eq!((half.bytes(), half.held()), (3 * ROW / 2, ROW / 2));
    let behind = all.get(5 * ROW..6 * ROW).expect("reserved");
    assert_eq!((behind.bytes(), behind.held()), (ROW, 0));
    assert_eq!(rig.read(&behind, 1), None);
}

#[test]
fn planned_rows_are_held_once_the_plan_is_settled() {
    let rig = Rig::new();
    let plan = rig.set.plan(4).expect("reserved");
    let during = rig.rows.slice();
    assert_eq!(during.held(), ROW);
    plan.cancel();
    assert_eq!(rig.read(&during, ROW), Some(()));
    assert_eq!(rig.rows.slice().held(), ROW);
    rig.commit(4);
    assert_eq!((during.held(), rig.rows.slice().held()), (ROW, 4 * ROW));
    assert_eq!(rig.read(&rig.rows.slice(), 4 * ROW), Some(()));
    // Merely dropped, a plan leaves its memory there.
    drop(rig.set.plan(6).expect("reserved"));
    assert_eq!(rig.read(&rig.rows.slice(), 6 * ROW), Some(()));
    rig.set.plan(8).expect("reserved").cancel();
    assert_eq!(rig.read(&rig.rows.slice(), 6 * ROW), Some(()));
}

#[test]
fn a_slice_keeps_what_it_holds_and_one_taken_after_a_trim_holds_less() {
    let rig = Rig::new();
    rig.commit(4);
    let all = rig.rows.slice();
    rig.commit(2);
    assert_eq!(rig.rows.slice().held(), 4 * ROW, "nothing was trimmed yet");
    rig.set.trim().expect_err("a slice holds four rows");
    assert_eq!(rig.read(&all, 4 * ROW), Some(()));
    drop(all);
    rig.set.trim().expect("nobody holds them");
    let after = rig.rows.slice();
    assert_eq!(after.held(), 2 * ROW);
    assert_eq!((rig.read(&after, 2 * ROW), rig.read(&after, 2 * ROW + 1)), (Some(()), None));
}

#[test]
fn rows_of_a_set_reach_as_far_as_its_capacity_and_others_as_far_as_they_hold() {
    let rig = Rig::new();
    let other = RowSet::new(&rig.context, &rig.stream, "other", 1, 8).expect("memory");
    let (all, set) = (rig.rows.slice(), &rig.set);
    assert!(all.has_rows(set, 8, ROW), "as many as the set comes to have");
    assert!(all.has_rows(&other, 1, ROW) && !all.has_rows(&other, 2, ROW));
    assert!(!all.has_rows(set, 2, ROW + 1), "longer rows lie elsewhere");
    assert!(!all.has_rows(set, u32::MAX, ROW), "none are reserved");
    let first = all.get(0..8 * ROW).expect("reserved");
    assert!(first.has_rows(set, 8, ROW) && !first.has_rows(set, 9, ROW));
    let second = all.get(ROW..8 * ROW).expect("reserved");
    assert!(!second.has_rows(set, 2, ROW), "its first row is another");
    let plain = rig.context.allocate("plain", 3 * ROW).expect("memory").slice();
    assert!(plain.has_rows(set, 3, ROW) && !plain.has_rows(set, 4, ROW));
}

#[test]
fn the_capacity_of_a_new_set_is_there_for_every_stream() {
    let rig = Rig::new();
    let other = rig.context.stream("other").expect("threads are left");
    for capacity in 1..200 {
        let set = RowSet::new(&rig.context, &rig.stream, "set", capacity, 200).expect("memory");
        let mut word = [0; 4];
        let queue = Queue::direct(rig.context.backend(), &other);
        // SAFETY: the set is only returned when what writes the word has run.
        unsafe { queue.download(&set.capacity_word(), &mut word) }.expect("the stream runs");
        assert_eq!(u32::from_le_bytes(word), capacity);
    }
}
