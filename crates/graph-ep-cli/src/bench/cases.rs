//! What is measured: every combination of the parameters that were asked for.

use graph_ep::token_dispatch::fp8::scale_row_bytes;
use graph_ep::{DType, ExpertParallel, ExpertParallelBuilder, HostBackend, Layout, Payload};

use super::args::MeasureArgs;
use super::inputs::Skew;
use super::report::{By, Case, Dtype, LayoutChoice, Op, Padding};
use crate::args::TransferChoice;

/// Bytes that the layers of one replay exceed together, so that none finds in a cache what it left
/// there at the replay before: twice the 50 MB of an H200's.
const CACHED: usize = 100 << 20;

/// Layers of one replay, at least and at most.
const LAYERS: std::ops::RangeInclusive<usize> = 4..=16;

/// The parameters of one exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Order of received rows.
    pub layout: LayoutChoice,
    /// Element type of tokens on their way.
    pub dtype: Dtype,
    /// Tokens of each rank.
    pub tokens: usize,
    /// Elements of a token.
    pub hidden: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Experts over all ranks.
    pub experts: usize,
    /// Ranks.
    pub ranks: usize,
    /// How choices are spread.
    pub skew: Skew,
    /// Streaming multiprocessors; 0 if all.
    pub sms: u32,
    /// Rows to which each expert's rows are rounded up.
    pub alignment: usize,
    /// What becomes of the rows that are added for that.
    pub padding: Padding,
    /// How rows get from rank to rank.
    pub transfer: TransferChoice,
}

impl Shape {
    /// The type of sums, and of tokens that are values: FP8 is added up as BF16.
    pub fn sums(&self) -> DType {
        match self.dtype {
            Dtype::Bf16 | Dtype::Fp8 => DType::Bf16,
            Dtype::Fp16 => DType::Fp16,
            Dtype::Fp32 => DType::Fp32,
        }
    }

    /// Whether rows are values, which can be added up as they are received.
    pub fn plain(&self) -> bool {
        self.dtype != Dtype::Fp8
    }

    /// Whether received rows have no groups.
    pub fn flat(&self) -> bool {
        self.layout == LayoutChoice::Flat
    }

    /// Bytes of a row of sums.
    pub fn sum_bytes(&self) -> usize {
        self.hidden * self.sums().bytes()
    }

    /// Bytes of a row on its way, without scales.
    pub fn row_bytes(&self) -> usize {
        if self.plain() { self.sum_bytes() } else { self.hidden }
    }

    /// Bytes of the scales beside a row.
    pub fn scale_bytes(&self) -> usize {
        if self.plain() { 0 } else { scale_row_bytes(self.hidden) }
    }

    /// The group that exchanges this. Its own receive rows are few: what is measured brings others.
    pub fn group(&self) -> ExpertParallelBuilder {
        let payload = match self.dtype {
            Dtype::Fp8 => {
                Payload::Bytes { row_bytes: self.row_bytes(), scale_bytes: self.scale_bytes() }
            }
            _ => Payload::Values,
        };
        ExpertParallel::<HostBackend>::builder(self.hidden, self.experts, self.top_k, self.tokens)
            .dtype(self.sums())
            .payload(payload)
            .layout(if self.flat() { Layout::Flat } else { Layout::ExpertGrouped })
            .transfer(self.transfer.into())
            .sm_budget(self.sms)
            .alignment(self.alignment as u32)
            .clear_padding(self.padding.is_cleared())
            .capacity_rows(self.alignment as u32)
    }

    /// The shape as the report has it. A way for rows that was asked for is part of the variant.
    pub fn case(
        &self,
        (op, variant): (Op, &str),
        gpus: usize,
        captured: bool,
        layers: usize,
    ) -> Case {
        let transfer = match self.transfer {
            TransferChoice::Auto => String::new(),
            asked => asked.to_string(),
        };
        let words = [variant, &transfer];
        let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
        Case {
            op,
            variant: words.join(", "),
            by: By::GraphEp,
            layout: self.layout,
            dtype: self.dtype,
            tokens: self.tokens,
            hidden: self.hidden,
            top_k: self.top_k,
            experts: self.experts,
            ranks: self.ranks,
            gpus,
            skew: self.skew.to_string(),
            sms: self.sms,
            padding: self.padding,
            captured,
            layers,
        }
    }

    /// Layers of one replay: as many as exceed caches, if each rank has `memory` bytes.
    pub fn layers(&self, memory: u64, quick: bool) -> usize {
        if quick {
            return 2;
        }
        let copies = if self.flat() { self.top_k.min(self.ranks) } else { self.top_k };
        let ends = self.tokens * (self.row_bytes() + self.scale_bytes() + self.sum_bytes());
        let held = self.row_bytes() + self.scale_bytes();
        let held = if self.plain() { held } else { held + self.sum_bytes() };
        let received = self.tokens * copies * held;
        let exceeding = (CACHED / (ends + received)).saturating_add(1);
        // A skewed rank may receive what all ranks send.
        let most = match self.skew {
            Skew::Uniform => received / 2 * 3,
            _ => received * self.ranks,
        };
        let affordable = memory / (ends + most).max(1) as u64;
        let affordable = usize::try_from(affordable).unwrap_or(usize::MAX).max(1);
        exceeding.clamp(*LAYERS.start(), *LAYERS.end()).min(affordable)
    }
}

/// A shape, and what is measured with it.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The shape.
    pub shape: Shape,
    /// The operations, each once.
    pub ops: Vec<Op>,
    /// Layers of one replay.
    pub layers: usize,
    /// Layers of a step that is replayed or recovered.
    pub step_layers: usize,
    /// Whether another library moves the same bytes.
    pub against: bool,
    /// The kernels that it runs.
    pub kernels: Kernels,
}

/// How the kernels of a measurement are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernels {
    /// As they are for everybody.
    Counting,
    /// Without counters: overflow goes unnoticed, and the record of a step says nothing of it.
    Bare,
}

/// Sizes for what the command line leaves open.
#[derive(Clone, Copy, Debug)]
struct Defaults {
    tokens: &'static [usize],
    layout: &'static [LayoutChoice],
    dtype: &'static [Dtype],
    top_k: usize,
    experts: usize,
    hidden: usize,
    alignment: usize,
}

impl Defaults {
    const MODEL: Self = Self {
        tokens: &[1, 128, 4096],
        layout: &[LayoutChoice::Expert],
        dtype: &[Dtype::Bf16],
        top_k: 8,
        experts: 256,
        hidden: 7168,
        alignment: 16,
    };
    const HOST: Self =
        Self { tokens: &[1, 32, 256], top_k: 4, experts: 16, hidden: 512, ..Self::MODEL };
    const QUICK: Self = Self {
        tokens: &[3, 40],
        layout: &[LayoutChoice::Expert, LayoutChoice::Flat],
        dtype: &[Dtype::Bf16, Dtype::Fp8],
        top_k: 2,
        experts: 8,
        hidden: 64,
        alignment: 4,
    };
}

/// Every combination of what `args` ask for, on so many GPUs; on the host if there are none. All ranks of
/// a GPU, or of the host, have `memory` bytes together.
pub fn measured(args: &MeasureArgs, gpus: usize, memory: u64) -> Vec<Measured> {
    let defaults = match (args.quick, gpus) {
        (true, _) => Defaults::QUICK,
        (false, 0) => Defaults::HOST,
        (false, _) => Defaults::MODEL,
    };
    let list = |given: &[usize], other: &[usize]| {
        if given.is_empty() { other.to_vec() } else { given.to_vec() }
    };
    let mut shapes = vec![Shape {
        layout: LayoutChoice::Expert,
        dtype: Dtype::Bf16,
        tokens: 1,
        hidden: defaults.hidden,
        top_k: defaults.top_k,
        experts: defaults.experts,
        ranks: 2,
        skew: Skew::Uniform,
        sms: 0,
        alignment: args.alignment.unwrap_or(defaults.alignment),
        padding: Padding::Cleared,
        transfer: TransferChoice::Auto,
    }];
    spread(&mut shapes, &list(&args.ranks, &[2]), |shape, ranks| shape.ranks = ranks);
    spread(&mut shapes, &list(&args.hidden, &[defaults.hidden]), |s, hidden| s.hidden = hidden);
    spread(&mut shapes, &list(&args.experts, &[defaults.experts]), |s, count| s.experts = count);
    spread(&mut shapes, &list(&args.top_k, &[defaults.top_k]), |shape, k| shape.top_k = k);
    let dtypes = if args.dtype.is_empty() { defaults.dtype } else { &args.dtype };
    spread(&mut shapes, dtypes, |shape, dtype| shape.dtype = dtype);
    let layouts = if args.layout.is_empty() { defaults.layout } else { &args.layout };
    spread(&mut shapes, layouts, |shape, layout| shape.layout = layout);
    let skews = if args.skew.is_empty() { &[Skew::Uniform][..] } else { &args.skew };
    spread(&mut shapes, skews, |shape, skew| shape.skew = skew);
    let paddings = if args.padding.is_empty() { &[Padding::Cleared][..] } else { &args.padding };
    spread(&mut shapes, paddings, |shape, padding| {
        // Rows without groups have none.
        shape.padding = if shape.flat() { Padding::Cleared } else { padding };
    });
    // Such shapes come once for each of `paddings`.
    shapes.dedup();
    let ways = if args.transfer.is_empty() { &[TransferChoice::Auto][..] } else { &args.transfer };
    spread(&mut shapes, ways, |shape, way| shape.transfer = way);
    let budgets = if args.sms.is_empty() { &[0][..] } else { &args.sms };
    spread(&mut shapes, budgets, |shape, sms| shape.sms = sms);
    spread(&mut shapes, &list(&args.tokens, defaults.tokens), |s, tokens| s.tokens = tokens);
    let (mut grown, mut compared) = (Vec::new(), Vec::new());
    let measured = shapes.into_iter().map(|shape| {
        let mut ops = asked(args);
        ops.retain(|op| match op {
            // Experts of this program read values in groups.
            Op::Replay | Op::Recover | Op::Host => shape.plain() && !shape.flat(),
            Op::Counters => shape.plain(),
            // Expert outputs that are not the rows themselves would not follow the windows.
            Op::Round => shape.plain(),
            _ => true,
        });
        // Growth knows nothing of tokens.
        let once = (shape.ranks, shape.hidden);
        if grown.contains(&once) {
            ops.retain(|op| *op != Op::Grow);
        } else {
            grown.push(once);
        }
        let sharing = shape.ranks.div_ceil(gpus.max(1)) as u64;
        let layers = shape.layers(memory / sharing, args.quick);
        // Another library does not know layouts and takes the multiprocessors that it likes.
        let alike = Shape {
            layout: LayoutChoice::Expert,
            sms: 0,
            alignment: 1,
            padding: Padding::Cleared,
            transfer: TransferChoice::Auto,
            ..shape
        };
        let against = args.against.is_some() && !compared.contains(&alike);
        compared.push(alike);
        Measured { shape, ops, layers, step_layers: 0, against, kernels: Kernels::Counting }
    });
    let measured = measured.flat_map(|measured| by_step_layers(measured, &args.step_layers));
    // The host's kernels always count, and on GPUs all have to be compiled once more.
    let bare = gpus > 0 && args.ops.contains(&Op::Counters);
    let measured = measured.flat_map(|measured| match bare {
        true => and_bare(measured),
        false => vec![measured],
    });
    measured.filter(|measured| !measured.ops.is_empty()).collect()
}

/// `measured` for each number of layers of a step, with only the first of which everything else is
/// measured.
fn by_step_layers(measured: Measured, all: &[usize]) -> Vec<Measured> {
    let mut found: Vec<Measured> = Vec::new();
    for step_layers in all {
        let mut more = Measured { step_layers: *step_layers, ..measured.clone() };
        if !found.is_empty() {
            more.ops.retain(|op| matches!(op, Op::Replay | Op::Recover | Op::Host | Op::Counters));
            more.against = false;
        }
        found.push(more);
    }
    found
}

/// `measured`, and where counters are what is measured the same without them.
fn and_bare(measured: Measured) -> Vec<Measured> {
    let mut bare = Measured { kernels: Kernels::Bare, against: false, ..measured.clone() };
    bare.ops.retain(|op| *op == Op::Counters);
    if bare.ops.is_empty() { vec![measured] } else { vec![measured, bare] }
}

/// The operations that were asked for, each once, in the order of a layer's life.
fn asked(args: &MeasureArgs) -> Vec<Op> {
    use clap::ValueEnum;
    let wanted = |op: &&Op| args.ops.is_empty() || args.ops.contains(op);
    Op::value_variants().iter().filter(wanted).copied().collect()
}

/// Puts each of `values` into a copy of each shape.
fn spread<T: Copy>(shapes: &mut Vec<Shape>, values: &[T], set: impl Fn(&mut Shape, T)) {
    let spread = shapes.iter().flat_map(|shape| {
        values.iter().map(|value| {
            let mut shape = *shape;
            set(&mut shape, *value);
            shape
        })
    });
    *shapes = spread.collect();
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::args::tests::parse;
    use super::*;

    /// A small one: 2 ranks, 5 tokens, top-2 of 8 experts.
    pub(crate) fn shape() -> Shape {
        Shape {
            layout: LayoutChoice::Expert,
            dtype: Dtype::Bf16,
            tokens: 5,
            hidden: 16,
            top_k: 2,
            experts: 8,
            ranks: 2,
            skew: Skew::Uniform,
            sms: 0,
            alignment: 4,
            padding: Padding::Cleared,
            transfer: TransferChoice::Auto,
        }
    }

    fn of(line: &str, gpus: usize) -> Vec<Measured> {
        measured(&parse(line).unwrap().measure, gpus, 1 << 36)
    }

    #[test]
    fn every_combination_is_measured_and_tokens_change_fastest() {
        let all = of("--tokens 1,2 --dtype bf16,fp8 --sms 0,24 --ops pair", 2);
        let found: Vec<_> =
            all.iter().map(|m| (m.shape.dtype, m.shape.sms, m.shape.tokens)).collect();
        let expected: Vec<_> = [Dtype::Bf16, Dtype::Fp8]
            .into_iter()
            .flat_map(|dtype| [(dtype, 0, 1), (dtype, 0, 2), (dtype, 24, 1), (dtype, 24, 2)])
            .collect();
        assert_eq!(found, expected);
        assert!(all.iter().all(|m| m.ops == [Op::Pair]));
    }

    #[test]
    fn operations_are_left_out_where_they_make_no_sense() {
        let all = of("--tokens 1,2 --layout expert,flat --dtype bf16,fp8", 2);
        let has = |op: Op| all.iter().filter(|m| m.ops.contains(&op)).count();
        assert_eq!((all.len(), has(Op::Dispatch), has(Op::Round)), (8, 8, 4));
        assert_eq!((has(Op::Replay), has(Op::Recover), has(Op::Grow)), (2, 2, 1));
        assert!(of("--ops replay --layout flat", 2).is_empty());
        // Twice is once.
        assert_eq!(of("--ops pair,pair --tokens 1", 0)[0].ops, [Op::Pair]);
    }

    #[test]
    fn kernels_without_counters_are_compiled_where_that_is_asked_for() {
        let found = |line: &str, gpus| -> Vec<(Kernels, usize)> {
            of(line, gpus).iter().map(|m| (m.kernels, m.ops.len())).collect()
        };
        assert_eq!(
            found("--tokens 1 --ops counters,pair", 2),
            [(Kernels::Counting, 2), (Kernels::Bare, 1)]
        );
        assert_eq!(found("--tokens 1 --ops counters", 0), [(Kernels::Counting, 1)]);
        let counts = |m: &Measured| m.kernels == Kernels::Counting && m.ops.contains(&Op::Counters);
        assert!(of("", 2).iter().all(counts));
    }

    #[test]
    fn a_way_that_was_asked_for_has_a_name() {
        let all = of("--tokens 1 --ops pair --transfer auto,pull", 2);
        let variants: Vec<String> =
            all.iter().map(|m| m.shape.case((Op::Pair, "W=1"), 2, true, 4).variant).collect();
        assert_eq!(variants, ["W=1", "W=1, pull"]);
        assert_eq!(all[1].shape.case((Op::Pair, ""), 2, true, 4).variant, "pull");
    }

    #[test]
    fn padding_is_a_parameter_where_there_is_some() {
        use Padding::{Cleared, Left};
        let all = of("--tokens 1 --ops pair --layout expert,flat --padding cleared,left", 2);
        let found: Vec<_> = all.iter().map(|m| (m.shape.layout, m.shape.padding)).collect();
        let (expert, flat) = (LayoutChoice::Expert, LayoutChoice::Flat);
        assert_eq!(found, [(expert, Cleared), (expert, Left), (flat, Cleared)]);
        assert_eq!(all[1].shape.case((Op::Pair, ""), 2, true, 4).padding, Left);
        assert_eq!(of("--tokens 1 --ops pair", 2)[0].shape.padding, Cleared);
    }

    #[test]
    fn layers_of_a_step_are_spread_over_what_has_steps() {
        let all = of("--tokens 8 --ops pair,replay,grow --step-layers 1,4,64", 2);
        let found: Vec<_> = all.iter().map(|m| (m.step_layers, m.ops.len())).collect();
        assert_eq!(found, [(1, 3), (4, 1), (64, 1)]);
        assert_eq!(of("--tokens 8 --ops pair --step-layers 1,4", 2).len(), 1);
    }

    #[test]
    fn bytes_are_compared_once() {
        let all = of("--tokens 1,2 --layout expert,flat --sms 0,24 --against nccl", 2);
        let compared: Vec<_> = all.iter().filter(|m| m.against).map(|m| m.shape).collect();
        assert_eq!(compared.iter().map(|shape| shape.tokens).collect::<Vec<_>>(), [1, 2]);
        assert!(of("", 2).iter().all(|m| !m.against));
    }

    #[test]
    fn defaults_follow_where_it_runs() {
        let tokens = |line: &str, gpus| -> Vec<usize> {
            of(line, gpus).iter().map(|m| m.shape.tokens).collect()
        };
        assert_eq!(tokens("", 1), [1, 128, 4096]);
        assert_eq!(tokens("", 0), [1, 32, 256]);
        assert_eq!(of("--quick", 0).len(), 8);
        assert_eq!(of("--alignment 64", 0)[0].shape.alignment, 64);
    }

    #[test]
    fn layers_exceed_a_cache_and_fit_the_memory() {
        let model = Shape { hidden: 7168, top_k: 8, experts: 256, alignment: 16, ..shape() };
        let layers = |tokens, memory| Shape { tokens, ..model }.layers(memory, false);
        const PLENTY: u64 = 64 << 30;
        assert_eq!(layers(1, PLENTY), 16);
        // 18 MB a layer.
        assert_eq!(layers(128, PLENTY), 6);
        assert_eq!(layers(4096, PLENTY), 4);
        assert_eq!(layers(4096, 2 << 30), 2);
        assert_eq!(layers(4096, 0), 1);
    }

    #[test]
    fn fp8_rows_have_scales_and_sums_are_bf16() {
        let fp8 = Shape { dtype: Dtype::Fp8, hidden: 7168, ..shape() };
        assert_eq!((fp8.row_bytes(), fp8.scale_bytes(), fp8.sum_bytes()), (7168, 224, 14336));
        let bf16 = Shape { hidden: 7168, ..shape() };
        assert_eq!((bf16.row_bytes(), bf16.scale_bytes()), (14336, 0));
    }
}
