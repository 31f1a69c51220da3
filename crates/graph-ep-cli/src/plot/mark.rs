//! Marks, by whose shape lines are told apart.

use plotters::element::IntoDynElement;
use plotters::prelude::*;

/// How many there are.
pub(crate) const MARKS: usize = 6;

/// Pixels from the middle of a mark to its edge.
const RADIUS: i32 = 5;

/// The shape of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    Disc,
    Ring,
    Square,
    Frame,
    Triangle,
    Cross,
}

impl Mark {
    /// That of the series at `place`.
    pub(crate) fn of(place: usize) -> Self {
        [Self::Disc, Self::Ring, Self::Square, Self::Frame, Self::Triangle, Self::Cross]
            [place % MARKS]
    }

    /// The mark at a place of the chart, or of the area.
    pub(crate) fn at<'a, DB: DrawingBackend + 'a, Coord: Clone + 'a>(
        self,
        at: Coord,
    ) -> DynElement<'a, DB, Coord> {
        let solid = BLACK.filled();
        // Filled with the page, so that the line does not run through it.
        let hollow = WHITE.filled();
        let stroke = BLACK.stroke_width(1);
        let corners = [(-RADIUS, -RADIUS), (RADIUS, RADIUS)];
        let at_place = EmptyElement::at(at);
        match self {
            Self::Disc => (at_place + Circle::new((0, 0), RADIUS, solid)).into_dyn(),
            Self::Ring => (at_place
                + Circle::new((0, 0), RADIUS, hollow)
                + Circle::new((0, 0), RADIUS, stroke))
            .into_dyn(),
            Self::Square => (at_place + Rectangle::new(corners, solid)).into_dyn(),
            Self::Frame => {
                (at_place + Rectangle::new(corners, hollow) + Rectangle::new(corners, stroke))
                    .into_dyn()
            }
            Self::Triangle => {
                (at_place + TriangleMarker::new((0, 0), RADIUS + 1, solid)).into_dyn()
            }
            Self::Cross => {
                (at_place + Cross::new((0, 0), RADIUS, BLACK.stroke_width(2))).into_dyn()
            }
        }
    }
}
