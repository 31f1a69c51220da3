//! What those who watch are told of a rank that is gone.

use std::sync::mpsc;

use super::*;

fn tells(tell: mpsc::Sender<Rank>) -> Gone {
    Box::new(move |gone| {
        // Where nobody listens any more, nobody wants to know.
        let _ = tell.send(gone);
    })
}

/// A connection that ends without a word is that of a process that has ended: everybody else is told,
/// although nobody makes a call.
#[test]
fn a_rank_whose_process_ends_is_noticed_between_calls() {
    for culprit in [1, 2] {
        let told = on_all(3, |rank| {
            let (tell, told) = mpsc::channel();
            rank.watch(tells(tell));
            rank.barrier("watching", LONG).expect("all come");
            if rank.rank() == Rank(culprit) {
                // As the system does when it ends a process.
                shutdown(&rank.wire.fd, Shutdown::Both).expect("it is open");
                return None;
            }
            let gone = told.recv_timeout(LONG).expect("somebody is gone");
            let error = rank.barrier("later", LONG).expect_err("the group has ended").to_string();
            assert!(error.contains(&format!("rank {culprit}")), "{error}");
            Some(gone)
        });
        assert_eq!(told.into_iter().flatten().collect::<Vec<_>>(), [Rank(culprit); 2]);
    }
}

/// A rank that leaves in order may have done all that the others still wait for.
#[test]
fn a_rank_that_leaves_in_order_is_not_gone() {
    for leaver in [0, 1] {
        on_all(3, |rank| {
            let (tell, told) = mpsc::channel();
            rank.watch(tells(tell));
            rank.barrier("watching", LONG).expect("all come");
            if rank.rank() == Rank(leaver) {
                return;
            }
            let error = rank.barrier("later", LONG).expect_err("it has left").to_string();
            assert!(error.contains(&format!("rank {leaver}")), "{error}");
            // The others leave after this one, which ended the group.
            drop(rank);
            assert_eq!(told.recv(), Err(mpsc::RecvError), "nobody was gone");
        });
    }
}

/// Whoever asks late is told of what was before, and of nothing where nothing was.
#[test]
fn a_rank_that_was_gone_before_is_told_of_at_once() {
    on_all(2, |rank| {
        if rank.rank() == Rank(1) {
            shutdown(&rank.wire.fd, Shutdown::Both).expect("it is open");
            return;
        }
        rank.barrier("later", LONG).expect_err("a rank is gone");
        let (tell, told) = mpsc::channel();
        rank.watch(tells(tell));
        assert_eq!(told.recv_timeout(LONG), Ok(Rank(1)));
        let (tell, told) = mpsc::channel();
        rank.watch(tells(tell));
        assert_eq!(told.recv_timeout(LONG), Ok(Rank(1)), "whoever watches now is told as well");
    });
}
