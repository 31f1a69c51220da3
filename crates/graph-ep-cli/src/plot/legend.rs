//! What the shapes mean.

use plotters::coord::Shift;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::panel::{
    AREA, CAPACITY_STROKE, EDGE, LEAST_DASH, MARK, least_style, overflow_style, shrink_mark,
};

/// Pixels of a sample, and from it to its text.
const SAMPLE: i32 = 32;
const GAP: i32 = 8;

/// Draws the legend as one line, whose middle is at `at`. `overlay` is for a single panel of all
/// ranks.
pub(super) fn draw<DB: DrawingBackend>(
    area: &DrawingArea<DB, Shift>,
    at: (i32, i32),
    overlay: bool,
) -> Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
    let (mut x, y) = at;
    let left = Pos::new(HPos::Left, VPos::Center);
    let style = ("sans-serif", 15).into_font().into_text_style(area).pos(left);
    // Writes the text of the sample at `x` and gives the place of the next; the width left for the
    // text is generous, since nobody knows the font.
    let text = |x: i32, text: &str, width: i32| {
        let start = x + SAMPLE + GAP;
        area.draw_text(text, &style, (start, y)).map(|()| start + width)
    };

    area.draw(&Rectangle::new([(x, y - 7), (x + SAMPLE, y + 7)], AREA.filled()))?;
    area.draw(&PathElement::new([(x, y - 7), (x + SAMPLE, y - 7)], EDGE.stroke_width(1)))?;
    x = if overlay {
        text(x, "rows required of the rank that requires most", 340)?
    } else {
        text(x, "rows required, largest over the layers of a step", 350)?
    };
    let line = [(x, y), (x + SAMPLE, y)];
    area.draw(&PathElement::new(line, BLACK.stroke_width(CAPACITY_STROKE)))?;
    x = text(x, if overlay { "largest capacity" } else { "capacity at launch" }, 145)?;
    if overlay {
        let (dash, gap) = LEAST_DASH;
        let line = [(x, y), (x + SAMPLE, y)];
        area.draw(&DashedPathElement::new(line, dash, gap, least_style()))?;
        x = text(x, "smallest", 80)?;
    }
    area.draw(&Cross::new((x + SAMPLE - MARK, y), MARK, overflow_style()))?;
    x = text(x, "overflow", 75)?;
    area.draw(&TriangleMarker::new((x + SAMPLE - MARK, y), MARK + 1, BLACK.filled()))?;
    x = text(x, "growth", 65)?;
    area.draw(&(EmptyElement::at((x + SAMPLE - MARK, y)) + shrink_mark()))?;
    text(x, "shrinking", 70)?;
    Ok(())
}
