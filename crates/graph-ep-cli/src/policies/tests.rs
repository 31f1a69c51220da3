//! The judgement as a whole: that it is complete, that it repeats, and what the default rests on.

use super::args::tests::parse;
use super::*;

fn report(line: &str) -> Report {
    judged(&parse(line).unwrap()).unwrap()
}

fn score<'r>(scene: &'r SceneScores, policy: &str) -> &'r Score {
    scene.scores.iter().find(|score| score.policy == policy).expect("it is judged")
}

#[test]
fn every_policy_is_judged_on_every_scene_and_again_alike() {
    let line = "--workload burst,ragged --ranks 2,4 --steps 12 --seeds 1,2";
    let first = report(line);
    assert_eq!(first, report(line));
    assert_eq!(first.scenes.len(), 4);
    for scene in &first.scenes {
        assert_eq!(scene.scores.len(), Candidate::all().len());
        for score in &scene.scores {
            assert_eq!(score.steps, 24);
            // Ranks need their most in different steps: who knows each step reserves less.
            let each = score.policy == "clairvoyant, each step";
            assert_eq!(score.rows_beyond() < 0, each, "{score:?}");
        }
        assert_eq!(score(scene, "clairvoyant").lost_us, 0.0);
        assert_eq!(score(scene, "worst case").replays, 0);
    }
    let text = table::render(&first);
    for expected in
        ["4 ranks: steps replayed", "adaptive × 1.2, shrink 4", "clairvoyant, each step"]
    {
        assert!(text.contains(expected), "{expected} in\n{text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 150), "{text}");
}

#[test]
fn no_scene_begins_above_its_worst_case() {
    let report = report("--workload burst --ranks 1,2 --steps 4 --seeds 1 --capacity-factor 100");
    for scene in &report.scenes {
        assert_eq!(scene.initial_rows, scene.worst_case_rows, "{} ranks", scene.ranks);
    }
}

/// What the default was chosen for: on recorded routing it replays no more than headroom, and where one
/// rank alone is hot it holds far fewer rows.
#[test]
fn the_default_is_headroom_that_spares_memory_where_one_rank_is_hot() {
    let default = graph_ep::GrowthPolicy::default().to_string();
    for ranks in [2, 8, 32] {
        let trace =
            &judged(&parse(&format!("--ranks {ranks} --steps 1")).unwrap()).unwrap().scenes[0];
        let (one, other) = (score(trace, &default), score(trace, "headroom × 1.2"));
        assert!(one.replays <= other.replays, "{ranks} ranks: {one:?}, {other:?}");
        let hot =
            &report(&format!("--workload hot-rank --ranks {ranks} --steps 64 --seeds 0")).scenes[0];
        let (one, other) = (score(hot, &default), score(hot, "headroom × 1.2"));
        assert_eq!(one.replays, other.replays, "{ranks} ranks");
        assert!(1.2 * one.held_ratio() < other.held_ratio(), "{ranks} ranks: {one:?}, {other:?}");
    }
}

#[test]
fn a_report_is_written_and_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("policies.json");
    let report = report("--workload burst --ranks 2 --steps 4 --seeds 0");
    report.write(&path).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    let read: Report = serde_json::from_str(&text).unwrap();
    assert_eq!(read, report);
    assert!(text.contains(SCHEMA));
}
