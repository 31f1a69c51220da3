//! What makes router decisions valid.

use super::{MAX_EXPERTS, Ownership, Position, RoutingError, RoutingParts};

/// Everything that [`super::Routing`] promises.
pub(super) fn parts(parts: &RoutingParts) -> Result<(), RoutingError> {
    let choices = dimensions(parts)?;
    length("the list of expert ids", choices, parts.ids.len())?;
    if let Some(weights) = &parts.weights {
        length("the list of weights", choices, weights.len())?;
    }
    for (what, labels) in
        [("the list of step labels", &parts.step_labels), ("the list of domains", &parts.domains)]
    {
        if let Some(labels) = labels {
            length(what, parts.steps, labels.len())?;
        }
    }
    ownership(parts)?;
    ids(parts)?;
    weights(parts)
}

/// No dimension is zero and their product can be addressed; gives the product.
pub(crate) fn dimensions(parts: &RoutingParts) -> Result<usize, RoutingError> {
    let RoutingParts { experts, top_k, steps, layers, tokens, .. } = *parts;
    for (dimension, size) in [
        ("experts", experts),
        ("steps", steps),
        ("layers", layers),
        ("tokens", tokens),
        ("choices a token (top-k)", top_k),
    ] {
        if size == 0 {
            return Err(RoutingError::Empty { dimension });
        }
    }
    if experts > MAX_EXPERTS {
        return Err(RoutingError::TooManyExperts { experts, limit: MAX_EXPERTS });
    }
    if top_k > experts {
        return Err(RoutingError::TopKExceedsExperts { top_k, experts });
    }
    [layers, tokens, top_k]
        .into_iter()
        .try_fold(steps, usize::checked_mul)
        .ok_or(RoutingError::TooLarge { steps, layers, tokens, top_k })
}

fn length(what: &'static str, expected: usize, found: usize) -> Result<(), RoutingError> {
    if expected == found { Ok(()) } else { Err(RoutingError::Length { what, expected, found }) }
}

fn position(parts: &RoutingParts, index: usize) -> Position {
    let row = index / parts.top_k;
    Position {
        step: row / parts.tokens / parts.layers,
        layer: row / parts.tokens % parts.layers,
        token: row % parts.tokens,
        choice: index % parts.top_k,
    }
}

/// Ids exist and are distinct within a token.
///
/// `chosen_by[e]` is the last row (counted from one) that chose expert e: one pass, whatever top-k
/// is.
fn ids(parts: &RoutingParts) -> Result<(), RoutingError> {
    let mut chosen_by = vec![0_usize; parts.experts];
    for (index, &id) in parts.ids.iter().enumerate() {
        let at = || position(parts, index);
        if id == -1 {
            continue;
        }
        let Ok(expert) = usize::try_from(id) else {
            return Err(RoutingError::NegativeId { at: at(), id });
        };
        let Some(last) = chosen_by.get_mut(expert) else {
            return Err(RoutingError::ExpertOutOfRange { at: at(), id, experts: parts.experts });
        };
        let row = index / parts.top_k + 1;
        if std::mem::replace(last, row) == row {
            return Err(RoutingError::ExpertTwice { at: at(), id });
        }
    }
    Ok(())
}

fn weights(parts: &RoutingParts) -> Result<(), RoutingError> {
    let weights = parts.weights.as_deref().unwrap_or_default();
    match weights.iter().position(|w| !w.is_finite()) {
        None => Ok(()),
        Some(index) => {
            Err(RoutingError::WeightNotFinite { at: position(parts, index), value: weights[index] })
        }
    }
}

fn ownership(parts: &RoutingParts) -> Result<(), RoutingError> {
    let Ownership::Split { ranks, offsets } = &parts.ownership else { return Ok(()) };
    if *ranks == 0 {
        return Err(RoutingError::NoRanks);
    }
    let tokens = parts.tokens;
    let expected = ranks.checked_add(1).and_then(|row| row.checked_mul(parts.steps));
    length("the list of token offsets", expected.unwrap_or(usize::MAX), offsets.len())?;
    for (step, row) in offsets.chunks_exact(ranks + 1).enumerate() {
        let mut least = 0;
        for (entry, &value) in row.iter().enumerate() {
            let right = match entry {
                0 => value == 0,
                _ if entry == *ranks => value == tokens,
                _ => (least..=tokens).contains(&value),
            };
            if !right {
                return Err(RoutingError::Ownership { step, tokens, entry, value });
            }
            least = value;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{Routing, tests::parts};
    use super::*;

    /// What `Routing::new` says of valid parts after `change`.
    fn refused(change: impl FnOnce(&mut RoutingParts)) -> RoutingError {
        let mut changed = parts();
        change(&mut changed);
        Routing::new(changed).expect_err("these parts are wrong")
    }

    #[test]
    fn valid_parts_pass_also_with_choices_not_made() {
        Routing::new(parts()).unwrap();
        let mut none = parts();
        none.ids.fill(-1);
        Routing::new(none).unwrap();
    }

    #[test]
    fn every_dimension_must_be_positive() {
        let changes: [fn(&mut RoutingParts); 5] = [
            |p| p.experts = 0,
            |p| p.steps = 0,
            |p| p.layers = 0,
            |p| p.tokens = 0,
            |p| p.top_k = 0,
        ];
        for change in changes {
            assert!(matches!(refused(change), RoutingError::Empty { .. }));
        }
    }

    #[test]
    fn sizes_are_bounded() {
        assert!(matches!(
            refused(|p| p.experts = MAX_EXPERTS + 1),
            RoutingError::TooManyExperts { .. }
        ));
        assert!(matches!(
            refused(|p| p.top_k = 6),
            RoutingError::TopKExceedsExperts { top_k: 6, experts: 5 }
        ));
        assert!(matches!(refused(|p| p.steps = usize::MAX / 2), RoutingError::TooLarge { .. }));
    }

    #[test]
    fn lists_have_the_lengths_that_the_dimensions_say() {
        let changes: [fn(&mut RoutingParts); 5] = [
            |p| _ = p.ids.pop(),
            |p| p.weights.as_mut().unwrap().push(1.0),
            |p| p.step_labels.as_mut().unwrap().push(1),
            |p| _ = p.domains.as_mut().unwrap().pop(),
            |p| p.ownership = Ownership::Split { ranks: 2, offsets: vec![0, 1, 3] },
        ];
        for change in changes {
            assert!(matches!(refused(change), RoutingError::Length { .. }));
        }
        // A number of ranks whose offsets cannot be counted is a wrong length, not an overflow.
        assert!(matches!(
            refused(|p| p.ownership = Ownership::Split { ranks: usize::MAX, offsets: vec![] }),
            RoutingError::Length { .. }
        ));
    }

    #[test]
    fn a_wrong_id_is_named_with_its_place() {
        // Index 17 = step 1, layer 0, token 2, choice 1.
        let at = Position { step: 1, layer: 0, token: 2, choice: 1 };
        assert_eq!(
            refused(|p| p.ids[17] = 5),
            RoutingError::ExpertOutOfRange { at, id: 5, experts: 5 }
        );
        assert_eq!(refused(|p| p.ids[17] = -2), RoutingError::NegativeId { at, id: -2 });
        let twice = refused(|p| p.ids[17] = p.ids[16]);
        assert_eq!(twice, RoutingError::ExpertTwice { at, id: 3 });
        assert_eq!(
            twice.to_string(),
            "step 1, layer 0, token 2, choice 1: expert 3 was already chosen by this token"
        );
    }

    #[test]
    fn weights_are_finite() {
        let at = Position { step: 0, layer: 1, token: 0, choice: 1 };
        assert_eq!(
            refused(|p| p.weights.as_mut().unwrap()[7] = f32::INFINITY),
            RoutingError::WeightNotFinite { at, value: f32::INFINITY }
        );
        assert!(matches!(
            refused(|p| p.weights.as_mut().unwrap()[0] = f32::NAN),
            RoutingError::WeightNotFinite { .. }
        ));
    }

    #[test]
    fn offsets_divide_the_tokens() {
        let split = |offsets: [usize; 6]| {
            refused(move |p| p.ownership = Ownership::Split { ranks: 2, offsets: offsets.to_vec() })
        };
        let wrong = |step, entry, value| RoutingError::Ownership { step, tokens: 3, entry, value };
        assert_eq!(split([1, 2, 3, 0, 1, 3]), wrong(0, 0, 1));
        assert_eq!(split([0, 2, 3, 0, 4, 3]), wrong(1, 1, 4));
        assert_eq!(split([0, 2, 3, 0, 1, 2]), wrong(1, 2, 2));
        assert_eq!(
            refused(|p| p.ownership = Ownership::Split { ranks: 0, offsets: vec![] }),
            RoutingError::NoRanks
        );
    }
}
