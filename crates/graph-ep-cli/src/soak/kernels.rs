//! The kernels of a soak, with their bodies on the host.

use bytemuck::{Pod, Zeroable};
use graph_ep::ep_context::{KernelSource, Specialization};
use graph_ep::{DType, Kernel};
use graph_ep_kernels::Text;
use graph_ep_kernels::soak::{CHECK, EXPERTS, HEADERS, INPUT};

use super::form::{Draw, Token, scale, shift};

/// What has been found so far, in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct State {
    /// The step that runs, or will next.
    pub(super) step: u64,
    /// Outputs of tokens that were compared.
    pub(super) compared: u64,
    /// Those that differ.
    pub(super) mismatches: u64,
    /// Pairs of token and expert that outputs lack.
    pub(super) missing: u64,
    /// Where the first mismatch was, if `claimed`.
    pub(super) bad_step: u64,
    pub(super) bad_layer: u32,
    pub(super) bad_token: u32,
    pub(super) bad_column: u32,
    /// Bits of f32 numbers.
    pub(super) bad_found: u32,
    pub(super) bad_expected: u32,
    pub(super) claimed: u32,
    /// Blocks of the comparison that are done.
    pub(super) arrived: u32,
    pub(super) reserved: u32,
}

/// What all kernels of a soak know.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Shape {
    pub(super) seed: u64,
    /// Address of the [`State`].
    pub(super) state: u64,
    pub(super) rank: u32,
    pub(super) world: u32,
    /// A multiple of `world`: each rank has a share of consecutive ones.
    pub(super) experts: u32,
    pub(super) top_k: u32,
    pub(super) hidden: u32,
    pub(super) max_tokens: u32,
    pub(super) layers: u32,
    /// One step of so many sends all tokens to one rank; zero for none.
    pub(super) burst: u32,
    /// Nonzero: ranks have fewer tokens than the most, differently in each step.
    pub(super) ragged: u32,
    /// Code of the number format, for the host; a device body is compiled for one.
    pub(super) format: u32,
}

impl Shape {
    /// All ranks, as a set.
    pub(super) fn all(&self) -> u32 {
        u32::MAX >> (u32::BITS - self.world)
    }

    fn dtype(&self) -> DType {
        DType::from_code(self.format).unwrap_or(DType::Fp32)
    }

    fn row_bytes(&self) -> usize {
        self.hidden as usize * self.dtype().bytes()
    }
}

/// Parameters of [`Input`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct InputParams {
    pub(super) shape: Shape,
    /// Where the state is kept as the step finds it.
    pub(super) before: u64,
    /// A u32: how many tokens.
    pub(super) count: u64,
    /// `[layers, max tokens, hidden]`.
    pub(super) tokens: u64,
    /// `[layers, max tokens, top_k]` i32.
    pub(super) ids: u64,
    /// `[layers, max tokens, top_k]` f32.
    pub(super) weights: u64,
}

/// Parameters of [`Experts`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ExpertsParams {
    pub(super) shape: Shape,
    /// `[capacity, hidden]`.
    pub(super) rows: u64,
    /// `[capacity, hidden]`.
    pub(super) outputs: u64,
    /// `[slots + 1]` i32.
    pub(super) expert_offsets: u64,
    /// `[slots]` i32.
    pub(super) tokens_per_expert: u64,
    /// `[capacity, width]` f32; zero where combine multiplies by the weights.
    pub(super) row_weights: u64,
    /// `[capacity, width]` i32 slots; zero where rows are grouped.
    pub(super) row_experts: u64,
    /// Experts of this rank.
    pub(super) slots: u32,
    /// Weights beside a row.
    pub(super) width: u32,
}

/// Parameters of [`Check`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct CheckParams {
    pub(super) shape: Shape,
    /// `[layers, max tokens, hidden]`.
    pub(super) outputs: u64,
    /// Nonzero: items may be left out, each as a whole.
    pub(super) dropping: u32,
    pub(super) reserved: u32,
}

const fn source((file, text): Text) -> KernelSource {
    KernelSource { file, text, headers: HEADERS }
}

/// All of them, as they are compiled ahead.
pub(crate) const SOURCES: [KernelSource; 3] = [source(INPUT), source(EXPERTS), source(CHECK)];

/// The constants that their device code is compiled with.
pub(crate) fn constants(dtype: DType) -> Specialization {
    Specialization::new().with("DTYPE", u64::from(dtype as u32))
}

fn pointer<T>(address: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// # Safety
///
/// `count` values lie at `address`, and nothing writes them while they are looked at.
unsafe fn table<'a, T: Pod>(address: u64, count: usize) -> &'a [T] {
    // SAFETY: as this function's contract says.
    unsafe { std::slice::from_raw_parts(pointer(address), count) }
}

/// # Safety
///
/// `count` values lie at `address`, and nothing else touches them meanwhile.
unsafe fn table_mut<'a, T: Pod>(address: u64, count: usize) -> &'a mut [T] {
    // SAFETY: as this function's contract says.
    unsafe { std::slice::from_raw_parts_mut(pointer(address), count) }
}

/// Makes the inputs of the step that the state names, and keeps the state as the step finds it.
#[derive(Debug)]
pub(super) struct Input;

impl Kernel for Input {
    type Params = InputParams;
    const NAME: &'static str = "soak_input";
    const SOURCE: Option<KernelSource> = Some(source(INPUT));

    unsafe fn run_on_host(p: &InputParams) {
        let s = &p.shape;
        // SAFETY: for this whole body, the launch vouches for the addresses and lengths.
        let state = unsafe { *pointer::<State>(s.state) };
        let draw = Draw::new(s, state.step);
        let tokens = draw.tokens(s.rank);
        // SAFETY: see above.
        unsafe {
            *pointer::<State>(p.before) = state;
            *pointer::<u32>(p.count) = tokens;
        }
        let (top_k, row_bytes) = (s.top_k as usize, s.row_bytes());
        for layer in 0..s.layers {
            for at in 0..tokens {
                let (token, unit) =
                    (draw.token(layer, s.rank, at), (layer * s.max_tokens + at) as usize);
                let beside = (4 * unit * top_k) as u64;
                // SAFETY: see above; the three are different memory.
                let (ids, weights, row) = unsafe {
                    (
                        table_mut::<i32>(p.ids + beside, top_k),
                        table_mut::<f32>(p.weights + beside, top_k),
                        table_mut::<u8>(p.tokens + (unit * row_bytes) as u64, row_bytes),
                    )
                };
                for ((choice, id), weight) in (0..).zip(ids).zip(weights) {
                    *id = token.expert(choice).map_or(-1, u32::cast_signed);
                    *weight = token.weight(choice) as f32;
                }
                let values: Vec<f32> = (0..s.hidden).map(|c| token.value(c) as f32).collect();
                s.dtype().encode(&values, row);
            }
        }
    }
}

/// The experts, on rows in either layout.
#[derive(Debug)]
pub(super) struct Experts;

impl Kernel for Experts {
    type Params = ExpertsParams;
    const NAME: &'static str = "soak_experts";
    const SOURCE: Option<KernelSource> = Some(source(EXPERTS));

    unsafe fn run_on_host(p: &ExpertsParams) {
        let (slots, width) = (p.slots as usize, p.width as usize);
        // SAFETY: for this whole body, the launch vouches for the addresses and lengths.
        let (offsets, counts) = unsafe {
            (table::<i32>(p.expert_offsets, slots + 1), table::<i32>(p.tokens_per_expert, slots))
        };
        let total = offsets[slots] as usize;
        let weights_of = |row: usize| match p.row_weights {
            0 => &[1.0][..],
            // SAFETY: see above.
            address => unsafe { table::<f32>(address + (4 * row * width) as u64, width) },
        };
        if p.row_experts != 0 {
            for row in 0..total {
                // SAFETY: see above.
                let local =
                    unsafe { table::<i32>(p.row_experts + (4 * row * width) as u64, width) };
                let beside = local.iter().copied().zip(weights_of(row).iter().copied());
                let chosen: Vec<_> = beside.filter(|(slot, _)| *slot >= 0).collect();
                // SAFETY: see above.
                unsafe { apply(p, row, &chosen) };
            }
            return;
        }
        for slot in 0..slots {
            let first = offsets[slot] as usize;
            for row in first..first + counts[slot] as usize {
                // SAFETY: see above.
                unsafe { apply(p, row, &[(slot as i32, weights_of(row)[0])]) };
            }
        }
    }
}

/// What the experts in these slots make of a row together, each with its weight.
///
/// # Safety
///
/// The row is one of those at `p`, which nothing else touches.
unsafe fn apply(p: &ExpertsParams, row: usize, chosen: &[(i32, f32)]) {
    let (s, row_bytes) = (&p.shape, p.shape.row_bytes());
    let at = (row * row_bytes) as u64;
    // SAFETY: as this function's contract says.
    let (from, to) = unsafe {
        (table::<u8>(p.rows + at, row_bytes), table_mut::<u8>(p.outputs + at, row_bytes))
    };
    let mut values = vec![0.0; s.hidden as usize];
    s.dtype().decode(from, &mut values);
    for (column, value) in (0..).zip(&mut values) {
        let of_expert = |(slot, weight): &(i32, f32)| {
            let expert = s.rank * p.slots + slot.cast_unsigned();
            let product = scale(expert) as f32 * *value;
            weight * (product + shift(expert, column) as f32)
        };
        *value = chosen.iter().map(of_expert).sum();
    }
    s.dtype().encode(&values, to);
}

/// Compares the outputs of all layers with what they have to be, and ends the step.
#[derive(Debug)]
pub(super) struct Check;

impl Kernel for Check {
    type Params = CheckParams;
    const NAME: &'static str = "soak_check";
    const SOURCE: Option<KernelSource> = Some(source(CHECK));

    unsafe fn run_on_host(p: &CheckParams) {
        let (s, row_bytes) = (&p.shape, p.shape.row_bytes());
        // SAFETY: for this whole body, the launch vouches for the addresses and lengths.
        let state = unsafe { &mut *pointer::<State>(s.state) };
        let draw = Draw::new(s, state.step);
        let mut values = vec![0.0; s.hidden as usize];
        for layer in 0..s.layers {
            for at in 0..draw.tokens(s.rank) {
                let (token, unit) =
                    (draw.token(layer, s.rank, at), (layer * s.max_tokens + at) as usize);
                // SAFETY: see above.
                let row = unsafe { table::<u8>(p.outputs + (unit * row_bytes) as u64, row_bytes) };
                s.dtype().decode(row, &mut values);
                state.compared += 1;
                let ranks = match p.dropping {
                    0 => Some(s.all()).filter(|all| differs(&token, s, *all, &values).is_none()),
                    // The largest set first: what is not missing is not to be called so.
                    _ => (0..=s.all())
                        .rev()
                        .find(|ranks| differs(&token, s, *ranks, &values).is_none()),
                };
                match ranks {
                    Some(ranks) => state.missing += u64::from(token.missing(s, ranks)),
                    None => {
                        let column = differs(&token, s, s.all(), &values).unwrap_or(0);
                        state.complain(layer, at, column, values[column as usize], &token, s);
                    }
                }
            }
        }
        state.step += 1;
    }
}

/// The first column that is not the sum over the ranks in a set.
fn differs(token: &Token, shape: &Shape, ranks: u32, values: &[f32]) -> Option<u32> {
    (0..).zip(values).find_map(|(column, value)| {
        (*value != token.expected(shape, ranks, column) as f32).then_some(column)
    })
}

impl State {
    /// Counts a mismatch and, if it is the first, keeps where it is.
    fn complain(
        &mut self,
        layer: u32,
        at: u32,
        column: u32,
        found: f32,
        token: &Token,
        shape: &Shape,
    ) {
        self.mismatches += 1;
        if self.claimed != 0 {
            return;
        }
        self.claimed = 1;
        self.bad_step = self.step;
        (self.bad_layer, self.bad_token, self.bad_column) = (layer, at, column);
        self.bad_found = found.to_bits();
        self.bad_expected = (token.expected(shape, shape.all(), column) as f32).to_bits();
    }
}
