//! Soaks on the host, and that they see what is wrong.

use clap::Parser;
use graph_ep::Rendezvous;
use graph_ep::ep_context::error::chain;

use super::kernels::{Shape, State};
use super::ranks::on_ranks;
use super::rig::Rig;
use super::*;
use crate::args::{Cli, Command};

fn parse(line: &str) -> SoakArgs {
    let words = ["graph-ep", "soak"].into_iter().chain(line.split_whitespace());
    match Cli::try_parse_from(words).expect("it parses").command {
        Command::Soak(args) => *args,
        other => panic!("{other:?}"),
    }
}

fn found(line: &str) -> Found {
    soak(&parse(line).command, 0, &host).expect("a verdict")
}

#[test]
fn every_mode_goes_on_and_is_verified() {
    for mode in ["recover", "rounds", "drop", "eager"] {
        let line =
            format!("replays --mode {mode} --replays 200 --burst 16 --tokens 6 --alignment 1");
        let entry = &found(&line).entries[0];
        assert!(entry.verified, "{entry:?}");
        assert_eq!((entry.steps, entry.mismatches), (200, 0));
        assert!(entry.compared > 500, "{entry:?}");
        let over = entry.overflowed;
        match mode {
            "recover" => {
                assert!(over > 3 && entry.replays >= over && entry.growths > over, "{entry:?}")
            }
            "rounds" => assert!(over > 3 && entry.most_windows > 1 && entry.replays == 0),
            "drop" => assert!(over > 3 && entry.dropped > 0 && entry.missing >= entry.dropped),
            _ => assert_eq!(entry.dropped, 0),
        }
    }
}

#[test]
fn random_groups_are_verified() {
    let found = found("random --groups 9 --episodes 4 --steps 12");
    assert_eq!(found.entries.len(), 9);
    for entry in &found.entries {
        assert!(entry.verified, "{entry:?}");
    }
}

#[test]
fn groups_that_come_and_go_are_counted() {
    let found = found("cycles --cycles 5 --tokens 4 --hidden 8");
    assert!(found.entries[0].verified);
    // Whether anything is left behind can only be seen in a process of its own.
    assert_eq!(found.held.map(|held| held.cycles), Some(5));
}

#[test]
fn one_thread_can_run_all_ranks() {
    for transfer in ["auto", "pull"] {
        let line =
            format!("phased --ranks 3 --experts 12 --steps 6 --burst 3 --transfer {transfer}");
        let entry = &found(&line).entries[0];
        assert!(entry.verified, "{entry:?}");
        assert!(entry.overflowed > 0 && entry.dropped > 0 && entry.missing == entry.dropped);
    }
}

/// A group whose experts are another's than the closed form has it is found out.
#[test]
fn a_wrong_output_is_seen_and_placed() {
    let args = parse("replays --tokens 4 --burst 0 --seed 5");
    let SoakCommand::Replays(args) = args.command else { panic!("another command") };
    let sizes = args.sizes.sizes(&args.common, false).unwrap();
    let found = on_ranks(2, &host, &|backend, place| {
        let rank = place.rank();
        let rig = Rig::new(backend, place, &sizes)?;
        let mut step = rig.begin()?;
        for layer in 0..sizes.layers {
            for half in rig::Half::ALL {
                // Rank 1's second layer is not combined: its output is that of nobody.
                let skipped = rank.0 == 1 && layer == 1 && half == rig::Half::CombineReceive;
                if !skipped {
                    rig.half(&mut step, layer, half)?;
                }
            }
        }
        rig.compare(&step, false)?;
        drop(step);
        Ok((rig.state()?, rig.shape()))
    })
    .unwrap();
    let [(fine, _), (wrong, shape)]: [(State, Shape); 2] = found.try_into().unwrap();
    assert_eq!((fine.mismatches, fine.claimed), (0, 0));
    let tokens = form::Draw::new(&shape, 0).tokens(1);
    assert!(tokens > 0, "another seed");
    assert_eq!((wrong.mismatches, wrong.compared), (u64::from(tokens), 2 * u64::from(tokens)));
    assert_eq!((wrong.claimed, wrong.bad_step, wrong.bad_layer), (1, 0, 1));
    let mut tally = tally::Tally::default();
    tally.state = Some(wrong);
    let entry = tally::entry(String::new(), String::new(), String::new(), &[tally]);
    assert!(!entry.verified);
    let place = entry.first_mismatch.expect("a place");
    assert!(place.contains("layer 1") && place.contains("0 and not"), "{place}");
}

#[test]
fn a_soak_begins_with_no_more_rows_than_there_can_be() {
    for line in ["replays --ranks 1 --capacity-factor 2", "replays --capacity-factor 1000"] {
        let SoakCommand::Replays(args) = parse(line).command else { panic!("another command") };
        let sizes = args.sizes.sizes(&args.common, false).unwrap();
        let ranks = on_ranks(sizes.ranks, &host, &|backend, place| {
            let rig = Rig::new(backend, place, &sizes)?;
            Ok((rig.group.rows().capacity(), rig.group.dispatcher().worst_case_rows()))
        });
        assert!(ranks.unwrap().iter().all(|(rows, worst)| rows == worst), "{line}");
    }
}

/// What a soak is said to need is what it has, so that a limit of as much holds and one byte less does not.
#[test]
fn memory_is_limited_to_all_that_a_rank_has() {
    let sizes = |line: &str| {
        let SoakCommand::Replays(args) = parse(line).command else { panic!("another command") };
        args.sizes.sizes(&args.common, false).unwrap()
    };
    for line in ["replays", "replays --layers 3 --top-k 2 --ranks 4 --dtype fp32 --alignment 1"] {
        let sizes = sizes(line);
        let needed = sizes.memory().unwrap();
        let limited = |limit| Sizes { memory_limit: Some(limit), ..sizes.clone() };
        let fitting = limited(needed);
        fitting.check().unwrap();
        let used = on_ranks(sizes.ranks, &host, &|backend, place| {
            Ok(Rig::new(backend, place, &fitting)?.group.context().account().used())
        });
        assert_eq!(used.unwrap(), vec![needed; sizes.ranks], "{line}");
        let error = limited(needed - 1).check().unwrap_err();
        assert!(matches!(error, graph_ep::Error::MemoryLimit { .. }), "{error}");
    }
    // Growth does not get past it: the soak ends, and says why.
    let needed = sizes("replays").memory().unwrap();
    let line = format!("replays --backend host --burst 1 --memory-limit {needed}");
    let error = run(&parse(&line)).unwrap_err();
    assert!(chain(&error).contains("out of memory"), "{}", chain(&error));
    assert_eq!(error.verdict(), Verdict::Failed);
}

#[test]
fn what_does_not_go_together_is_refused() {
    for (line, part) in [
        ("replays --mode static", "static"),
        ("replays --experts 9", "multiple"),
        ("replays --top-k 9", "at most 8"),
        ("replays --top-k 4 --experts 2", "at most 2"),
        ("replays --mode drop --ranks 8", "dropped"),
        ("phased --ranks 6 --experts 12", "dropped"),
        ("replays --ranks 33 --experts 66", "at most 32 in a soak"),
        ("random --ranks 33", "at most 32 in a soak"),
        ("cycles --ranks 64 --experts 64", "at most 32 in a soak"),
        ("phased --ranks 33", "at most 32 in a soak"),
        ("replays --tokens 100000", "at most 65536"),
        ("replays --capacity-factor 1e9", "the capacity factor is 1000000000"),
        ("cycles --capacity-factor 1e9", "the capacity factor is 1000000000"),
        ("phased --capacity-factor 1e9", "the capacity factor is 1000000000"),
        ("replays --memory-limit 1KiB", "on a rank, but its memory limit is 1024"),
        ("random --memory-limit 1KiB", "on a rank, but its memory limit is 1024"),
        ("cycles --memory-limit 1KiB", "on a rank, but its memory limit is 1024"),
        ("phased --memory-limit 1KiB", "on a rank, but its memory limit is 1024"),
        // So many that no machine has them: nothing of it is allocated.
        (
            "replays --tokens 65536 --layers 65536 --hidden 1048576 --top-k 8 --memory-limit 1GiB",
            "on a rank, but its memory limit is 1073741824",
        ),
    ] {
        let error = run(&parse(&format!("{line} --backend host"))).expect_err(line);
        let said = chain(&error);
        assert!(said.contains(part), "{line}: {said}");
        assert_eq!(error.verdict(), Verdict::BadInput, "{line}");
    }
}

#[test]
fn reports_come_back_as_they_were_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    let line = format!("phased --backend host --hidden 8 --steps 1 --report {}", path.display());
    assert_eq!(run(&parse(&line)).unwrap(), Verdict::Verified);
    let report: Report = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!((report.schema.as_str(), report.verified, report.ranks), (SCHEMA, true, 2));
    assert!(!report.command.contains('/') || report.command.contains("report.json"));
    let table = table::render(&report);
    assert!(table.contains("VERIFIED") && table.contains("1 steps in phases"), "{table}");
}
