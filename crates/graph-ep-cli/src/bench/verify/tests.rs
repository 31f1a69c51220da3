use std::convert::Infallible;

use super::*;
use crate::bench::cases::tests::shape;
use crate::bench::report::{Dtype, LayoutChoice};

const PLACE: (usize, usize) = (1, 0);

/// Received rows of one rank as the text of the layout has it, written without the reference.
struct Model {
    found: Found,
    rows: Vec<Vec<u8>>,
    scales: Vec<Vec<u8>>,
    experts: Vec<Vec<i32>>,
    weights: Vec<Vec<f32>>,
}

impl Model {
    fn new(shape: &Shape, given: &Given, rank: usize) -> Self {
        let (routing, layer) = PLACE;
        let local = shape.experts / shape.ranks;
        let own = rank * local..(rank + 1) * local;
        let mut model = Self {
            found: Found { offsets: vec![0], counts: vec![0; local], total: 0 },
            rows: vec![],
            scales: vec![],
            experts: vec![],
            weights: vec![],
        };
        let tokens = (0..shape.ranks).flat_map(|s| (0..shape.tokens).map(move |t| (s, t)));
        let choices = |(source, token): (usize, usize)| -> Vec<(usize, f32)> {
            let range = token * shape.top_k..(token + 1) * shape.top_k;
            let ids = &given.inputs.ids(routing, layer, source)[range.clone()];
            let weights = &given.inputs.weights(routing, layer, source)[range];
            let mut choices: Vec<(usize, f32)> =
                ids.iter().map(|id| *id as usize).zip(weights.iter().copied()).collect();
            choices.retain(|(expert, _)| own.contains(expert));
            choices.sort_by_key(|(expert, _)| *expert);
            choices
        };
        let add = |model: &mut Self, (source, token)| {
            model.rows.push(given.rows.token(layer, source, token).to_vec());
            model.scales.extend(given.rows.scales(layer, source, token).map(<[u8]>::to_vec));
        };
        for slot in 0..local {
            for place in tokens.clone() {
                let takes = choices(place).iter().any(|(expert, _)| *expert == own.start + slot);
                model.found.counts[slot] += i32::from(takes);
                if takes && !shape.flat() {
                    add(&mut model, place);
                }
            }
            while !model.rows.len().is_multiple_of(shape.alignment) {
                model.rows.push(vec![0; shape.row_bytes()]);
                model.scales.push(vec![0; shape.scale_bytes()]);
            }
            model.found.offsets.push(model.rows.len() as i32);
        }
        if shape.flat() {
            for place in tokens {
                let choices = choices(place);
                if choices.is_empty() {
                    continue;
                }
                add(&mut model, place);
                let width = shape.top_k.min(local);
                let mut experts: Vec<i32> =
                    choices.iter().map(|(expert, _)| (expert - own.start) as i32).collect();
                let mut weights: Vec<f32> = choices.iter().map(|(_, weight)| *weight).collect();
                experts.resize(width, -1);
                weights.resize(width, 0.0);
                model.experts.push(experts);
                model.weights.push(weights);
            }
            model.found.offsets[local] = model.rows.len() as i32;
        }
        model.found.total = model.rows.len() as i32;
        model
    }

    fn read(&self, part: Part, range: Range<usize>) -> Vec<u8> {
        match part {
            Part::Row => self.rows[range].concat(),
            Part::Scales => self.scales[range].concat(),
            Part::Experts => bytemuck::cast_slice(&self.experts[range].concat()).to_vec(),
            Part::Weights => bytemuck::cast_slice(&self.weights[range].concat()).to_vec(),
        }
    }

    fn wrong(&self, oracle: &Oracle<'_>) -> Option<&'static str> {
        let read = |part, range| Ok::<_, Infallible>(self.read(part, range));
        let Ok(wrong) = oracle.received(PLACE, &self.found, read);
        wrong.map(|wrong| wrong.what)
    }
}

fn shapes() -> Vec<Shape> {
    let mut shapes = Vec::new();
    for layout in [LayoutChoice::Expert, LayoutChoice::Flat] {
        for dtype in [Dtype::Bf16, Dtype::Fp16, Dtype::Fp32, Dtype::Fp8] {
            shapes.push(Shape { layout, dtype, tokens: 9, ranks: 2, ..shape() });
        }
    }
    shapes
}

#[test]
fn what_is_right_passes_and_each_thing_that_is_wrong_is_named() {
    for shape in shapes() {
        let given = Given::new(&shape, 1, 3);
        for rank in 0..shape.ranks {
            let oracle = Oracle::new(&shape, &given, rank).unwrap();
            let right = || Model::new(&shape, &given, rank);
            assert_eq!(right().wrong(&oracle), None, "{shape:?}");
            type Damage = fn(&mut Model);
            let mut damages: Vec<(Damage, &str)> = vec![
                (|model| model.found.counts[0] += 1, "the count of expert"),
                (|model| *model.found.offsets.last_mut().unwrap() -= 1, "the offset of expert"),
                (|model| model.found.total += 1, "the total, not"),
                (|model| model.rows[0][3] ^= 1, "received row"),
                (|model| *model.rows.last_mut().unwrap().last_mut().unwrap() ^= 1, "received row"),
                (|model| model.rows.swap(0, 1), "received row"),
            ];
            if !shape.plain() {
                damages.push((|model| model.scales[0][0] ^= 1, "the scales of received row"));
            }
            if shape.flat() {
                damages.push((|model| model.experts[1][0] += 1, "the experts beside received row"));
                damages
                    .push((|model| model.weights[1][0] *= 2.0, "the weights beside received row"));
            }
            for (damage, what) in damages {
                let mut model = right();
                damage(&mut model);
                assert_eq!(model.wrong(&oracle), Some(what), "{shape:?}");
            }
        }
    }
}

#[test]
fn padding_that_is_left_may_hold_anything_and_rows_beside_it_may_not() {
    for dtype in [Dtype::Bf16, Dtype::Fp8] {
        let cleared = Shape { dtype, tokens: 9, ..shape() };
        let left = Shape { padding: Padding::Left, ..cleared };
        let given = Given::new(&cleared, 1, 3);
        let spoilt = |real: bool| {
            let mut model = Model::new(&cleared, &given, 0);
            let expert = model.found.counts.iter().position(|count| count % 4 != 0).unwrap();
            let end = (model.found.offsets[expert] + model.found.counts[expert]) as usize;
            let row = if real { end - 1 } else { end };
            model.rows[row][3] ^= 1;
            model
        };
        let wrong =
            |shape: &Shape, model: Model| model.wrong(&Oracle::new(shape, &given, 0).unwrap());
        assert_eq!(wrong(&left, spoilt(false)), None, "{dtype}");
        assert_eq!(wrong(&left, spoilt(true)), Some("received row"), "{dtype}");
        assert_eq!(wrong(&cleared, spoilt(false)), Some("received row"), "{dtype}");
    }
}

/// The output of a token, from the models of all receivers: a sum for each rank, rounded, added up.
fn output(shape: &Shape, given: &Given, results: Results, rank: usize, token: usize) -> Vec<u8> {
    let (routing, layer) = PLACE;
    let local = shape.experts / shape.ranks;
    let round = |values: &[f32]| -> Vec<f32> {
        let (mut bytes, mut rounded) = (vec![0; shape.sum_bytes()], vec![0.0; shape.hidden]);
        shape.sums().encode(values, &mut bytes);
        shape.sums().decode(&bytes, &mut rounded);
        rounded
    };
    let range = token * shape.top_k..(token + 1) * shape.top_k;
    let mut choices: Vec<(usize, f32)> = given.inputs.ids(routing, layer, rank)[range.clone()]
        .iter()
        .map(|id| *id as usize)
        .zip(given.inputs.weights(routing, layer, rank)[range].iter().copied())
        .collect();
    choices.sort_by_key(|(expert, _)| *expert);
    let own = given.rows.token(layer, rank, token);
    let mut sum = vec![0.0_f32; shape.hidden];
    for receiver in 0..shape.ranks {
        let model = Model::new(shape, given, receiver);
        let mut partial = vec![0.0_f32; shape.hidden];
        let mut here = choices.clone();
        here.retain(|(expert, _)| expert / local == receiver);
        if here.is_empty() {
            continue;
        }
        if shape.flat() {
            here = vec![(here[0].0, 1.0)];
        }
        for (expert, weight) in here {
            let group = match shape.flat() {
                true => 0..model.rows.len(),
                false => {
                    let slot = expert % local;
                    model.found.offsets[slot] as usize..model.found.offsets[slot + 1] as usize
                }
            };
            let row = group.start + model.rows[group].iter().position(|row| row == own).unwrap();
            let mut values = vec![0.0; shape.hidden];
            match given.rows.result(layer, receiver, row) {
                Some(result) => shape.sums().decode(result, &mut values),
                None => shape.sums().decode(own, &mut values),
            }
            if results == Results::Synthetic {
                values = round(&synthetic::apply(expert as u32, &values));
            }
            for (partial, value) in partial.iter_mut().zip(values) {
                *partial += weight * value;
            }
        }
        for (sum, partial) in sum.iter_mut().zip(round(&partial)) {
            *sum += partial;
        }
    }
    let mut bytes = vec![0; shape.sum_bytes()];
    shape.sums().encode(&sum, &mut bytes);
    bytes
}

#[test]
fn outputs_are_compared_bit_for_bit() {
    for shape in shapes() {
        let given = Given::new(&shape, 1, 3);
        let oracle = Oracle::new(&shape, &given, 1).unwrap();
        let mut kinds = vec![Results::Rows];
        if shape.plain() && !shape.flat() {
            kinds.push(Results::Synthetic);
        }
        for results in kinds {
            let wrong = |damaged: Option<usize>| {
                let read = |token| -> Result<Vec<u8>, ReferenceError> {
                    let mut output = output(&shape, &given, results, 1, token);
                    if damaged == Some(token) {
                        output[5] ^= 1;
                    }
                    Ok(output)
                };
                oracle.outputs(PLACE, (PLACE.1, 1), results, read).unwrap().map(|wrong| wrong.at)
            };
            assert_eq!(wrong(None), None, "{shape:?}, {results:?}");
            assert_eq!(wrong(Some(7)), Some(7), "{shape:?}, {results:?}");
        }
    }
}

#[test]
fn samples_take_in_both_ends() {
    assert_eq!(ends(10, 3), [0..3, 7..10]);
    assert_eq!(ends(5, 3), [0..3, 3..5]);
    assert_eq!(ends(2, 3).first(), Some(&(0..2)));
    assert_eq!(ends(2, 3).len(), 1);
    assert!(ends(0, 3).is_empty());
    assert_eq!(sample(5, 256, 3).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    let few: Vec<usize> = sample(100, 10, 3).collect();
    assert_eq!((few[0], few[9], few.len()), (3, 93, 10));
}

#[test]
fn a_mismatch_says_where() {
    let mismatch = Mismatch { rank: 1, layer: 2, what: "the output of token", at: 7 };
    assert_eq!(mismatch.to_string(), "rank 1, layer 2: the output of token 7 is wrong");
}
