//! Groups whose ranks are threads, but which meet over TCP as processes do.

mod strangers;
mod watch;

use std::net::TcpListener;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::thread;

use super::*;
use crate::rendezvous::agree;

const LONG: Duration = Duration::from_secs(120);

/// Ports that no other group of this process uses; those of other processes are told by the name.
fn place() -> (String, std::ops::Range<u16>) {
    static PLACES: AtomicU32 = AtomicU32::new(0);
    let place = PLACES.fetch_add(1, Relaxed);
    let first = 20_000 + (process::id() * 64 + place) % 400 * 24;
    let first = u16::try_from(first).expect("below 29600");
    (format!("{}-{place}", process::id()), first..first + 24)
}

fn configs(world: usize) -> Vec<TcpConfig> {
    let (group, ports) = place();
    (0..world)
        .map(|rank| {
            TcpConfig::new(Rank::from_index(rank), world, "127.0.0.1", ports.clone())
                .and_then(|config| config.with_group(group.clone()))
                .expect("a configuration")
                .with_token(Token::new("secret of the test"))
        })
        .collect()
}

/// Runs `body` on one thread a configuration and returns what each gives back.
fn on_each<T: Send>(
    configs: impl IntoIterator<Item = TcpConfig>,
    body: impl Fn(TcpConfig) -> T + Sync,
) -> Vec<T> {
    thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> =
            configs.into_iter().map(|config| scope.spawn(move || body(config))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    })
}

fn meet(config: &TcpConfig) -> TcpRendezvous {
    TcpRendezvous::meet(config, LONG).expect("all meet")
}

fn on_all<T: Send>(world: usize, body: impl Fn(TcpRendezvous) -> T + Sync) -> Vec<T> {
    on_each(configs(world), |config| body(meet(&config)))
}

#[test]
fn payloads_come_in_the_order_of_ranks_round_after_round() {
    for world in [1, 2, 3, 5, 16] {
        on_all(world, |rank| {
            assert_eq!(rank.world(), world);
            for round in 0..20 {
                let mine = format!("{round} of {}", rank.rank()).into_bytes();
                let purpose = format!("round {round}");
                let all = rank.all_gather(&purpose, &mine, LONG).expect("all come");
                let expected: Vec<_> = (0..world)
                    .map(|peer| format!("{round} of {}", Rank::from_index(peer)).into_bytes())
                    .collect();
                assert_eq!(all, expected);
            }
            // A complete round is not lost where a rank leaves after it, so nobody waits here.
        });
    }
}

#[test]
fn long_payloads_arrive_whole() {
    on_all(3, |rank| {
        let length = [0, 100_000, MAX_PAYLOAD][rank.rank().index()];
        let all = rank.all_gather("state", &vec![7; length], LONG).expect("all come");
        let lengths: Vec<usize> = all.iter().map(Vec::len).collect();
        assert_eq!(lengths, [0, 100_000, MAX_PAYLOAD]);
        assert!(all.iter().flatten().all(|byte| *byte == 7));
    });
}

#[test]
fn differing_purposes_are_named_everywhere() {
    let errors = on_all(4, |rank| {
        let purpose = if rank.rank() == Rank(2) { "growing" } else { "starting" };
        let error = rank.all_gather(purpose, b"", LONG).expect_err("purposes differ").to_string();
        let again = rank.barrier("later", LONG).expect_err("the group has ended").to_string();
        assert_eq!(again, error);
        error
    });
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    assert!(errors[0].contains("rank 2 is at \"growing\""), "{}", errors[0]);
    assert!(errors[0].contains("is at \"starting\""), "{}", errors[0]);
}

#[test]
fn configurations_are_compared() {
    let errors = on_all(3, |rank| {
        let value = if rank.rank() == Rank(1) { "7168" } else { "4096" };
        let error = agree(&rank, "model", &[("hidden", value.to_owned())], LONG);
        rank.barrier("the group still works", LONG).expect("it does");
        error.expect_err("they differ").to_string()
    });
    assert_eq!(errors, ["model: hidden is 4096 on rank 0 and 7168 on rank 1"; 3]);
}

#[test]
fn a_deadline_names_all_who_are_missing_and_ends_the_group() {
    let (kept, told) = (Mutex::new(None), Mutex::new(Vec::new()));
    on_all(4, |rank| {
        let error = match rank.rank() {
            // It leaves when the others have been told.
            Rank(0) => return *kept.lock().expect("unused") = Some(rank),
            Rank(1) => {
                let error = rank.barrier("growing", Duration::ZERO).expect_err("alone");
                let again = rank.barrier("other", LONG).expect_err("ended");
                assert_eq!(again.to_string(), error.to_string());
                error
            }
            _ => rank.barrier("growing", Duration::MAX).expect_err("one gives up"),
        };
        told.lock().expect("no panic").push(error.to_string());
    });
    for error in told.into_inner().expect("no panic") {
        assert!(error.starts_with("growing: rank 0"), "{error}");
        assert!(error.ends_with("did not come within 0ns"), "{error}");
    }
}

#[test]
fn a_rank_that_leaves_is_named_at_once() {
    for leaving in [Rank(0), Rank(1)] {
        let errors = on_all(3, |rank| {
            if rank.rank() == leaving {
                return None;
            }
            Some(rank.barrier("meeting", Duration::MAX).expect_err("one has left").to_string())
        });
        let text = format!("meeting: {leaving} has left the group");
        assert_eq!(errors.iter().flatten().collect::<Vec<_>>(), [&text; 2]);
    }
}

#[test]
fn a_rank_that_gives_up_says_why() {
    for culprit in [0, 2] {
        let reasons = on_all(3, |rank| {
            if rank.rank() == Rank(culprit) {
                rank.abort("no memory");
                rank.abort("another reason");
            }
            rank.barrier("growing", Duration::MAX).expect_err("one has given up").to_string()
        });
        assert_eq!(reasons, vec![format!("growing: rank {culprit} gave up: no memory"); 3]);
    }
}

#[test]
fn an_abort_ends_a_call_of_the_same_rank() {
    let (turn, next) = std::sync::mpsc::channel();
    let next = Mutex::new(next);
    on_all(2, |rank| {
        if rank.rank() == Rank(1) {
            // It does not come before the other has given up, nor does it leave.
            next.lock().expect("a turn").recv().expect("a turn");
            let error = rank.barrier("growing", LONG).expect_err("given up").to_string();
            assert_eq!(error, "growing: rank 0 gave up: signal");
            return;
        }
        thread::scope(|scope| {
            let call = scope.spawn(|| rank.barrier("growing", Duration::MAX));
            rank.abort("signal");
            let error = call.join().expect("a thread").expect_err("given up").to_string();
            assert_eq!(error, "growing: rank 0 gave up: signal");
        });
        turn.send(()).expect("told");
    });
}

#[test]
fn a_payload_is_bounded() {
    let text = "state: rank 1 has a payload of 16777217 bytes, more than the 16777216 allowed";
    let errors = on_all(2, |rank| {
        let payload = vec![0; if rank.rank() == Rank(1) { MAX_PAYLOAD + 1 } else { 0 }];
        rank.all_gather("state", &payload, LONG).expect_err("too long").to_string()
    });
    assert_eq!(errors, [text; 2]);
}

#[test]
fn a_second_call_of_one_rank_is_refused_and_changes_nothing() {
    let (turn, next) = std::sync::mpsc::channel();
    let next = Mutex::new(next);
    on_all(2, |rank| {
        if rank.rank() == Rank(1) {
            next.lock().expect("a turn").recv().expect("a turn");
            assert_eq!(rank.all_gather("state", b"b", LONG).expect("both come"), [b"a", b"b"]);
            return;
        }
        thread::scope(|scope| {
            let call = || rank.all_gather("state", b"a", LONG);
            let calls = [scope.spawn(call), scope.spawn(call)];
            while !calls.iter().any(thread::ScopedJoinHandle::is_finished) {
                thread::yield_now();
            }
            turn.send(()).expect("told");
            let outcomes = calls.map(|call| call.join().expect("a thread"));
            assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1);
            let busy =
                |outcome: &Result<_, _>| matches!(outcome, Err(RendezvousError::Busy { .. }));
            assert!(outcomes.iter().any(busy), "{outcomes:?}");
        });
    });
}

#[test]
fn ranks_that_never_came_are_named() {
    let mut configs = configs(4);
    configs.truncate(1);
    let errors = on_each(configs, |config| {
        TcpRendezvous::meet(&config, Duration::ZERO).expect_err("alone").to_string()
    });
    assert_eq!(errors, ["meeting: rank 1, rank 2, rank 3 did not come within 0ns"]);
}

#[test]
fn a_rank_without_rank_0_says_where_it_looked() {
    let config = configs(2).remove(1);
    let error = TcpRendezvous::meet(&config, Duration::from_millis(50)).expect_err("nobody");
    let text = error.to_string();
    assert!(text.starts_with("rank 0 did not come to 127.0.0.1 within 50ms: "), "{text}");
}

#[test]
fn a_rank_that_comes_twice_is_named_on_both_sides() {
    let mut configs = configs(3);
    configs[2] = configs[1].clone();
    let errors = on_each(configs, |config| {
        TcpRendezvous::meet(&config, LONG).expect_err("one rank twice").to_string()
    });
    let text = "rank 1 came twice; were two processes started with the same RANK?";
    assert_eq!(errors, [text; 3]);
}

#[test]
fn a_rank_of_another_world_is_named_on_both_sides() {
    let mut configs = configs(2);
    configs[1].world = 5;
    let errors = on_each(configs, |config| {
        TcpRendezvous::meet(&config, LONG).expect_err("worlds differ").to_string()
    });
    let text = "rank 0 is one of 2 ranks and rank 1 one of 5; do all have the same WORLD_SIZE?";
    assert_eq!(errors, [text; 2]);
}

#[test]
fn a_rank_that_speaks_nonsense_is_named() {
    let errors = on_all(3, |rank| {
        if rank.rank() == Rank(2) {
            let frame = frame(&"nonsense").expect("framed");
            assert_eq!(write(rank.wire.fd.as_fd(), &frame), Written::Part(frame.len()));
        }
        rank.barrier("growing", LONG).expect_err("nonsense").to_string()
    });
    let text = "growing: the message of rank 2 cannot be read";
    assert!(errors.iter().all(|error| error.starts_with(text)), "{errors:?}");
}

#[test]
fn ranks_meet_over_ipv6_and_by_name() {
    for host in ["::1", "localhost"] {
        if host == "::1" && TcpListener::bind((host, 0)).is_err() {
            // This machine has no IPv6.
            continue;
        }
        let configs = configs(2).into_iter().map(|config| TcpConfig {
            host: host.to_owned(),
            token: None,
            ..config
        });
        let met = on_each(configs, |config| meet(&config).barrier("the end", LONG).is_ok());
        assert_eq!(met, [true; 2]);
    }
}

#[test]
fn without_a_token_nobody_listens_or_connects_beyond_this_machine() {
    for config in configs(2) {
        let config = TcpConfig { host: "0.0.0.0".to_owned(), token: None, ..config };
        let error = TcpRendezvous::meet(&config, LONG).expect_err("unprotected");
        assert!(matches!(error, TcpError::Unprotected { .. }), "{error}");
        assert!(error.to_string().contains("GRAPH_EP_JOB_TOKEN"), "{error}");
    }
}

#[test]
fn a_port_that_is_taken_is_an_error_of_rank_0() {
    let taken = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = taken.local_addr().expect("bound").port();
    let config = TcpConfig { ports: vec![port], ..configs(2).remove(0) };
    let error = TcpRendezvous::meet(&config, LONG).expect_err("taken");
    assert!(matches!(error, TcpError::Listen { first_port, .. } if first_port == port), "{error}");
}
