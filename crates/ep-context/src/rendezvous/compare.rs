//! Comparing what every rank was configured with.

use std::time::Duration;

use super::{Rendezvous, RendezvousError, message};
use crate::Rank;

/// Compares named values between all ranks; all of them call it with the same names in the same
/// order. Blocks until they have, for at most `deadline`.
///
/// # Errors
///
/// Where values differ, [`RendezvousError::Differs`] for the first field that does; where the names
/// do, as between two versions of a program, [`RendezvousError::Fields`]. Every rank gets the same
/// error, and the group can still be used. Else as [`Rendezvous::all_gather`].
pub fn agree(
    rendezvous: &dyn Rendezvous,
    purpose: &str,
    fields: &[(&'static str, String)],
    deadline: Duration,
) -> Result<(), RendezvousError> {
    let mine = message::encode(fields, rendezvous.rank(), purpose)?;
    let gathered = rendezvous.all_gather(purpose, &mine, deadline)?;
    let lists: Vec<Fields<'_>> = message::decode_all(&gathered, purpose)?;
    compare(purpose, &lists)
}

pub(super) type Fields<'a> = Vec<(&'a str, &'a str)>;

fn compare(purpose: &str, lists: &[Fields<'_>]) -> Result<(), RendezvousError> {
    let longest = lists.iter().map(Vec::len).max().unwrap_or(0);
    let first = Rank(0);
    for place in 0..longest {
        let reference = lists[0].get(place);
        for (rank, list) in lists.iter().enumerate().skip(1) {
            let (second, other) = (Rank::from_index(rank), list.get(place));
            if reference == other {
                continue;
            }
            let purpose = purpose.to_owned();
            return Err(match (reference, other) {
                (Some((field, first_value)), Some((same, second_value))) if field == same => {
                    RendezvousError::Differs {
                        purpose,
                        field: (*field).to_owned(),
                        first,
                        first_value: (*first_value).to_owned(),
                        second,
                        second_value: (*second_value).to_owned(),
                    }
                }
                _ => RendezvousError::Fields {
                    purpose,
                    first,
                    first_field: reference.map(|(field, _)| (*field).to_owned()),
                    second,
                    second_field: other.map(|(field, _)| (*field).to_owned()),
                },
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::thread;

    use proptest::prelude::*;

    use super::*;
    use crate::rendezvous::ThreadGroup;
    use crate::rendezvous::message::decode;

    const LONG: Duration = Duration::from_secs(60);

    fn fields(list: &[(&'static str, &str)]) -> Vec<(&'static str, String)> {
        list.iter().map(|(name, value)| (*name, (*value).to_owned())).collect()
    }

    /// What every rank says when each has its own list.
    fn agreed(lists: &[&[(&'static str, &str)]]) -> Vec<Result<(), String>> {
        let group = ThreadGroup::new(lists.len()).expect("a group");
        thread::scope(|scope| {
            let ranks: Vec<_> = group
                .into_iter()
                .zip(lists)
                .map(|(rank, list)| {
                    scope.spawn(move || {
                        let outcome = agree(&rank, "model", &fields(list), LONG);
                        rank.barrier("the group still works", LONG).expect("it does");
                        outcome.map_err(|error| error.to_string())
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().expect("a rank")).collect()
        })
    }

    #[test]
    fn equal_configurations_agree() {
        let list: &[_] = &[("hidden", "4096"), ("top-k", "8")];
        assert_eq!(agreed(&[list; 5]), vec![Ok(()); 5]);
        assert_eq!(agreed(&[&[][..]; 2]), vec![Ok(()); 2]);
    }

    #[test]
    fn the_first_difference_is_named_with_the_lowest_ranks() {
        let list: &[_] = &[("hidden", "4096"), ("top-k", "8")];
        let later: &[_] = &[("hidden", "4096"), ("top-k", "6")];
        let first: &[_] = &[("hidden", "7168"), ("top-k", "8")];
        let text = "model: hidden is 4096 on rank 0 and 7168 on rank 3";
        let lists = [list, later, list, first, first];
        assert_eq!(agreed(&lists), vec![Err(text.to_owned()); 5]);
    }

    #[test]
    fn other_fields_are_another_version() {
        let list: &[_] = &[("hidden", "4096")];
        let longer: &[_] = &[("hidden", "4096"), ("lanes", "2")];
        let other: &[_] = &[("width", "4096")];
        let question = "do all ranks run the same version?";
        let nothing =
            format!("model: rank 0 compares nothing where rank 1 compares lanes; {question}");
        assert_eq!(agreed(&[list, longer]), vec![Err(nothing); 2]);
        let renamed =
            format!("model: rank 0 compares hidden where rank 1 compares width; {question}");
        assert_eq!(agreed(&[list, other]), vec![Err(renamed); 2]);
    }

    #[test]
    fn what_is_not_a_list_is_refused_with_the_rank() {
        let mut group = ThreadGroup::new(2).expect("a group");
        let (stranger, rank) = (group.remove(1), group.remove(0));
        thread::scope(|scope| {
            scope.spawn(|| stranger.all_gather("model", &[200, 1, 2], LONG).map(drop));
            let error = agree(&rank, "model", &fields(&[("a", "b")]), LONG).expect_err("garbage");
            assert!(matches!(error, RendezvousError::Malformed { rank: Rank(1), .. }), "{error}");
        });
    }

    proptest! {
        #[test]
        fn reading_bytes_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode::<Fields<'_>>(&bytes);
        }

        #[test]
        fn reading_is_the_inverse_of_writing(
            list in proptest::collection::vec((".{0,20}", ".{0,20}"), 0..20),
        ) {
            let mut bytes = postcard::to_allocvec(&list).expect("written");
            let back: Fields<'_> = decode(&bytes).expect("read");
            let list: Vec<_> = list.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
            prop_assert_eq!(back, list);
            bytes.push(0);
            prop_assert!(decode::<Fields<'_>>(&bytes).is_err());
        }
    }
}
