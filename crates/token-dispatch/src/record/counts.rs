//! Numbers of a record, in memory that later records use again.
//!
//! A step that fits is read once in every few milliseconds for as long as an engine runs, by a thread
//! that has other things to do: so reading its record allocates nothing once a few were read and dropped.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::{Arc, Mutex, PoisonError};

/// A list of numbers of one record: a slice of `u32`. A clone is the same list.
#[derive(Clone)]
pub struct Counts {
    words: Arc<[u32]>,
    range: Range<usize>,
}

impl Deref for Counts {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        // The range fits, by every way to make one; a list can also be looked at where nothing may panic.
        self.words.get(self.range.clone()).unwrap_or_default()
    }
}

impl Default for Counts {
    fn default() -> Self {
        Self::from([])
    }
}

impl<const N: usize> From<[u32; N]> for Counts {
    fn from(words: [u32; N]) -> Self {
        Self { words: Arc::new(words), range: 0..N }
    }
}

impl From<Vec<u32>> for Counts {
    fn from(words: Vec<u32>) -> Self {
        Self { range: 0..words.len(), words: words.into() }
    }
}

impl From<&[u32]> for Counts {
    fn from(words: &[u32]) -> Self {
        Self { words: words.into(), range: 0..words.len() }
    }
}

impl FromIterator<u32> for Counts {
    fn from_iter<I: IntoIterator<Item = u32>>(words: I) -> Self {
        let words: Arc<[u32]> = words.into_iter().collect();
        Self { range: 0..words.len(), words }
    }
}

impl<T: AsRef<[u32]> + ?Sized> PartialEq<T> for Counts {
    fn eq(&self, other: &T) -> bool {
        **self == *other.as_ref()
    }
}

impl Eq for Counts {}

impl PartialEq<Counts> for [u32] {
    fn eq(&self, other: &Counts) -> bool {
        *self == **other
    }
}

impl PartialEq<Counts> for &[u32] {
    fn eq(&self, other: &Counts) -> bool {
        **self == **other
    }
}

impl<const N: usize> PartialEq<Counts> for [u32; N] {
    fn eq(&self, other: &Counts) -> bool {
        self[..] == **other
    }
}

impl PartialEq<Counts> for Vec<u32> {
    fn eq(&self, other: &Counts) -> bool {
        self[..] == **other
    }
}

impl AsRef<[u32]> for Counts {
    fn as_ref(&self) -> &[u32] {
        self
    }
}

impl<'c> IntoIterator for &'c Counts {
    type Item = &'c u32;
    type IntoIter = std::slice::Iter<'c, u32>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl fmt::Debug for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// Memory for the numbers of records.
#[derive(Debug)]
pub(super) struct Pool {
    /// The most numbers of a record.
    words: usize,
    /// Those that nobody else holds can be used again.
    known: Mutex<Vec<Arc<[u32]>>>,
}

/// The most that a pool keeps: callers that hold on to more records than this allocate for each.
const KEPT: usize = 16;

impl Pool {
    /// For records of at most so many numbers. Allocates nothing yet.
    pub(super) fn new(words: usize) -> Self {
        Self { words, known: Mutex::default() }
    }

    /// `N` lists behind each other, `ends[i]` being where list `i` ends, in words that `read` writes. Only
    /// allocates where all memory is in use. The caller sees to it that ends rise, and that the last is
    /// within the most numbers of a record.
    pub(super) fn lists<const N: usize>(
        &self,
        ends: [usize; N],
        read: impl FnOnce(&mut [u32]),
    ) -> [Counts; N] {
        debug_assert!(ends.is_sorted(), "{ends:?}");
        let end = ends.last().copied().unwrap_or(0);
        debug_assert!(end <= self.words, "{ends:?} in {} words", self.words);
        let length = end.min(self.words);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let free = |words: &mut Arc<[u32]>| Arc::get_mut(words).is_some();
        let mut words = match known.iter_mut().position(free) {
            Some(at) => known.swap_remove(at),
            None => vec![0; self.words].into(),
        };
        if let Some(free) = Arc::get_mut(&mut words) {
            read(&mut free[..length]);
        }
        let mut from = 0;
        let lists = ends.map(|to| {
            let range = from..to;
            from = to;
            Counts { words: words.clone(), range }
        });
        if known.len() < KEPT {
            known.push(words);
        }
        lists
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lists(pool: &Pool, first: u32) -> [Counts; 2] {
        pool.lists([2, 5], |words| {
            words.iter_mut().zip(first..).for_each(|(word, number)| *word = number);
        })
    }

    #[test]
    fn lists_are_what_was_read_and_compare_like_slices() {
        let pool = Pool::new(5);
        let [one, other] = lists(&pool, 10);
        assert_eq!(one, [10, 11]);
        assert_eq!(other, vec![12, 13, 14]);
        assert_eq!((one.len(), other.iter().sum::<u32>()), (2, 39));
        assert_ne!(one, other);
        assert_eq!(format!("{one:?}"), "[10, 11]");
        assert_eq!(Counts::from(vec![10, 11]), one);
        assert_eq!(Counts::from(&one[..]), one);
        assert_eq!((10..12).collect::<Counts>(), one);
        let slice: &[u32] = &[10, 11];
        assert!([10, 11] == one && vec![10, 11] == one && slice == one && *slice == one);
        assert!([10, 12] != one && vec![10] != one && slice != other && *slice != other);
        assert_eq!(Counts::default(), []);
        let [] = pool.lists([], |words| assert!(words.is_empty()));
    }

    #[test]
    fn memory_is_used_again_when_nobody_looks_at_it_and_not_before() {
        let pool = Pool::new(7);
        let [held, dropped] = lists(&pool, 10);
        drop(dropped);
        let [other, _] = lists(&pool, 20);
        assert_eq!((&held[..], &other[..]), (&[10, 11][..], &[20, 21][..]));
        let places = [held.as_ptr(), other.as_ptr()];
        assert_ne!(places[0], places[1]);
        drop((held, other));
        for _ in 0..3 {
            let [again, _] = lists(&pool, 30);
            assert!(places.contains(&again.as_ptr()));
        }
        assert_eq!(pool.known.lock().expect("no panic").len(), 2);
    }

    #[test]
    fn a_pool_keeps_a_few() {
        let pool = Pool::new(5);
        let many: Vec<_> = (0..3 * KEPT as u32).map(|first| lists(&pool, first)).collect();
        assert!(many.iter().zip(0..).all(|([one, _], first)| *one == [first, first + 1]));
        drop(many);
        assert_eq!(pool.known.lock().expect("no panic").len(), KEPT);
    }
}
