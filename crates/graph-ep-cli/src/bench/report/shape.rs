//! Cases in words: what all of them share is said once, and each names only what tells it apart.

use super::{By, Case};

/// How many parameters a case has beside its operation, its variant and whose code ran.
const PARAMETERS: usize = 13;

/// Which parameters differ among some cases.
#[derive(Clone, Debug)]
pub(crate) struct Shapes {
    /// Those of the first case, in words.
    first: [String; PARAMETERS],
    /// Whether some other case has another.
    differs: [bool; PARAMETERS],
}

impl Shapes {
    /// Compares `cases`.
    pub(crate) fn of<'a>(cases: impl IntoIterator<Item = &'a Case>) -> Self {
        let mut cases = cases.into_iter().map(words);
        let first = cases.next().unwrap_or_default();
        let mut differs = [false; PARAMETERS];
        for words in cases {
            for (differs, (word, first)) in differs.iter_mut().zip(words.iter().zip(&first)) {
                *differs |= word != first;
            }
        }
        Self { first, differs }
    }

    /// What all cases share.
    pub(crate) fn shared(&self) -> String {
        self.chosen(&self.first, false)
    }

    /// What tells `case` apart; empty if nothing does.
    pub(crate) fn name(&self, case: &Case) -> String {
        self.chosen(&words(case), true)
    }

    fn chosen(&self, words: &[String; PARAMETERS], differs: bool) -> String {
        let chosen =
            words.iter().zip(self.differs).filter(|(word, d)| *d == differs && !word.is_empty());
        chosen.map(|(word, _)| word.as_str()).collect::<Vec<_>>().join(", ")
    }
}

/// An operation, with its variant and whose it is unless it is our own: `recover W=2`,
/// `dispatch (nccl)`. A variant that is named like the operation adds nothing.
pub(crate) fn operation(case: &Case) -> String {
    let mut text = case.op.to_string();
    if !case.variant.is_empty() && case.variant != text {
        text.push(' ');
        text.push_str(&case.variant);
    }
    if case.by != By::GraphEp {
        text.push_str(&format!(" ({})", case.by));
    }
    text
}

/// Every parameter; one of which there is none is no word, since then it is an axis or means nothing, and so
/// is padding that is cleared, as it usually is.
/// Names that came from a file may hold anything, and lines are lines.
fn words(case: &Case) -> [String; PARAMETERS] {
    let Case { layout, dtype, tokens, hidden, top_k, experts, ranks, gpus, skew, .. } = case;
    let counted = |number: usize, one: &str| match number {
        0 => String::new(),
        1 => format!("1 {one}"),
        _ => format!("{number} {one}s"),
    };
    [
        counted(*tokens, "token"),
        format!("{layout} layout"),
        dtype.to_string(),
        if *hidden == 0 { String::new() } else { format!("hidden {hidden}") },
        if *top_k == 0 { String::new() } else { format!("top-{top_k}") },
        counted(*experts, "expert"),
        counted(*ranks, "rank"),
        match *gpus {
            0 => "host".to_owned(),
            usize::MAX => "a GPU each".to_owned(),
            gpus => counted(gpus, "GPU"),
        },
        skew.replace(char::is_control, "?"),
        if case.sms == 0 { "all SMs".to_owned() } else { counted(case.sms as usize, "SM") },
        if case.padding.is_cleared() { String::new() } else { format!("padding {}", case.padding) },
        if case.captured { "captured" } else { "launched" }.to_owned(),
        counted(case.layers, "layer"),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::tests::case;
    use super::super::{Axis, By, Dtype, Op, Padding};
    use super::*;

    #[test]
    fn what_is_shared_is_said_once() {
        let cases = [case(Op::Dispatch, 1), Case { dtype: Dtype::Fp8, ..case(Op::Combine, 128) }];
        let shapes = Shapes::of(&cases);
        assert_eq!(
            shapes.shared(),
            "expert layout, hidden 7168, top-8, 256 experts, 2 ranks, 2 GPUs, uniform, all SMs, \
             captured, 8 layers"
        );
        assert_eq!(shapes.name(&cases[0]), "1 token, bf16");
        assert_eq!(shapes.name(&cases[1]), "128 tokens, fp8");
        let over = cases.map(|case| Axis::Tokens.erased(&case));
        let shapes = Shapes::of(&over);
        assert_eq!(shapes.name(&over[1]), "fp8");
        assert!(!shapes.shared().contains("token") && !shapes.shared().contains("layers"));
    }

    #[test]
    fn one_case_and_none_have_nothing_to_tell_apart() {
        let one = case(Op::Dispatch, 1);
        assert_eq!(Shapes::of([&one]).name(&one), "");
        assert_eq!(Shapes::of([]).shared(), "");
    }

    /// Two cases that differ, differ in words: else a table would hold two lines of one name.
    #[test]
    fn every_parameter_tells_apart() {
        let case = case(Op::Dispatch, 2);
        let other = Case {
            layout: super::super::LayoutChoice::Flat,
            dtype: Dtype::Fp16,
            tokens: 3,
            hidden: 8,
            top_k: 1,
            experts: 1,
            ranks: 1,
            gpus: 0,
            skew: "zipf".into(),
            sms: 1,
            padding: Padding::Left,
            captured: false,
            layers: 1,
            ..case.clone()
        };
        let shapes = Shapes::of([&case, &other]);
        assert_eq!(shapes.differs, [true; PARAMETERS]);
        assert_eq!(shapes.shared(), "");
        assert_eq!(operation(&other), "dispatch");
        let other = Case { variant: "W=2".into(), by: By::Nccl, ..other };
        assert_eq!(operation(&other), "dispatch W=2 (nccl)");
    }
}
