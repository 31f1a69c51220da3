//! Whoever is not of the group, on either side of a connection.

use std::io::{Read, Write};
use std::net::TcpStream;

use super::*;

/// The port at which rank 0 listens, found as a stranger would.
fn listening(config: &TcpConfig) -> TcpStream {
    loop {
        for port in config.ports() {
            if let Ok(stream) = TcpStream::connect(("127.0.0.1", *port)) {
                return stream;
            }
        }
        thread::yield_now();
    }
}

#[test]
fn strangers_neither_join_nor_disturb() {
    let mut configs = configs(3);
    let strangers = configs[0].clone();
    let late: Vec<_> = configs.drain(1..).collect();
    thread::scope(|scope| {
        let first = scope.spawn(|| meet(&configs[0]).barrier("the end", LONG));
        let mut kept = vec![listening(&strangers)];
        let place = kept[0].peer_addr().expect("connected");
        // More of them than the hub keeps, silent or with half a message.
        for stranger in 0..200 {
            let Ok(mut stream) = TcpStream::connect(place) else { continue };
            let said =
                [&b""[..], b"GET / HTTP/1.1\r\n\r\n", b"\x20\0\0\0GRAPH", &[255; 4096], &[0; 99]];
            // It may be turned away already.
            let _ = stream.write_all(said[stranger % said.len()]);
            kept.push(stream);
        }
        let rest = on_each(late, |config| meet(&config).barrier("the end", LONG));
        assert!(rest.iter().all(Result::is_ok), "{rest:?}");
        first.join().expect("a thread").expect("all came");
    });
}

#[test]
fn without_the_token_a_rank_neither_joins_nor_disturbs() {
    let configs = configs(2);
    for other in [None, Token::new("another secret")] {
        thread::scope(|scope| {
            let first = scope.spawn(|| meet(&configs[0]).barrier("the end", LONG));
            drop(listening(&configs[0]));
            let wrong = configs[1].clone().with_token(other);
            loop {
                let error = TcpRendezvous::meet(&wrong, Duration::from_millis(500));
                let error = error.expect_err("it does not know the token");
                if matches!(&error, TcpError::Unreachable { obstacle: Obstacle::Token { .. }, .. })
                {
                    assert!(error.to_string().contains("GRAPH_EP_JOB_TOKEN"), "{error}");
                    break;
                }
            }
            meet(&configs[1]).barrier("the end", LONG).expect("all come");
            first.join().expect("a thread").expect("all came");
        });
    }
}

#[test]
fn a_rank_without_a_proof_is_not_let_in() {
    let configs = configs(2);
    thread::scope(|scope| {
        let first = scope.spawn(|| meet(&configs[0]).barrier("the end", LONG));
        let mut stranger = listening(&configs[0]);
        let group = configs[0].group.as_str();
        let preface = wire::Preface::OURS;
        let hello = wire::Hello { preface, group, rank: 1, world: 2, nonce: [0; 32] };
        stranger.write_all(&frame(&hello).expect("framed")).expect("said");
        let mut length = [0; 4];
        stranger.read_exact(&mut length).expect("a greeting");
        let mut greeting = vec![0; u32::from_le_bytes(length) as usize];
        stranger.read_exact(&mut greeting).expect("a greeting");
        let greeting: wire::Greeting = decode(&greeting).expect("a greeting");
        // The hub's own proof is none for a rank.
        let joining = frame(&wire::Joining { proof: greeting.proof }).expect("framed");
        stranger.write_all(&joining).expect("said");
        assert_eq!(stranger.read(&mut length).unwrap_or(0), 0, "the hub hangs up");
        meet(&configs[1]).barrier("the end", LONG).expect("all come");
        first.join().expect("a thread").expect("all came");
    });
}

#[test]
fn listeners_that_are_not_ours_are_passed_by() {
    let configs = configs(2);
    let ports = configs[0].ports();
    let silent = TcpListener::bind(("127.0.0.1", ports[0]));
    let rude = TcpListener::bind(("127.0.0.1", ports[1]));
    let old = TcpListener::bind(("127.0.0.1", ports[2]));
    let mut other = TcpConfig::new(Rank(0), 2, "127.0.0.1", [ports[3]]).expect("a configuration");
    other.group = "another job".to_owned();
    thread::scope(|scope| {
        let _other = scope.spawn(|| TcpRendezvous::meet(&other, Duration::from_secs(5)).map(drop));
        // An answer of another protocol, and one of another version of ours.
        let preface = [&b"GRAPH-EP"[..], &[9]].concat();
        let version = [&u32::to_le_bytes(9)[..], &preface].concat();
        for (listener, answer) in [(rude, b"220 ready\r\n".to_vec()), (old, version)] {
            let Ok(listener) = listener else { continue };
            scope.spawn(move || {
                let Ok((mut stream, _)) = listener.accept() else { return };
                let _ = stream.write_all(&answer);
                let _ = stream.read(&mut [0; 1024]);
            });
        }
        let ranks = [1, 0].map(|rank| {
            let config = &configs[rank];
            scope.spawn(move || meet(config).barrier("the end", LONG))
        });
        for rank in ranks {
            rank.join().expect("a thread").expect("all come");
        }
        // Ends the waits of listeners that nobody came to.
        for port in &ports[1..3] {
            drop(TcpStream::connect(("127.0.0.1", *port)));
        }
    });
    drop(silent);
}

#[test]
fn another_version_is_named() {
    let config = configs(2).remove(1);
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = listener.local_addr().expect("bound").port();
    let config = TcpConfig { ports: vec![port], ..config };
    let told = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !told.load(Relaxed) {
                let Ok((mut stream, _)) = listener.accept() else { return };
                let _ = stream.write_all(b"\x09\0\0\0GRAPH-EP\x09");
                let _ = stream.read(&mut [0; 1024]);
            }
        });
        loop {
            let error = TcpRendezvous::meet(&config, Duration::from_millis(200));
            let error = error.expect_err("another version");
            let TcpError::Unreachable { obstacle, .. } = &error else { panic!("{error}") };
            if let Obstacle::Version { version, .. } = obstacle {
                assert_eq!(*version, 9);
                break;
            }
        }
        told.store(true, Relaxed);
        drop(TcpStream::connect(("127.0.0.1", port)));
    });
}
