//! Draws a [`Timeline`]: what each guest takes, what all take together, and what
//! is saved.
//!
//! The text of the picture is text in the SVG: no font is needed to draw it.

use anyhow::anyhow;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::timeline::{Sample, Timeline};

/// Size of the picture, in pixels.
const SIZE: (u32, u32) = (960, 420);
/// Width of the legend beside it.
const LEGEND: u32 = 200;
/// Height of a line in it, and width of the mark in front of one.
const LINE: i32 = 22;
const MARK: i32 = 12;
/// With more guests than this, no colour tells one from another.
const MAX_COLOURS: usize = 8;

const FONT: &str = "sans-serif";
const INK: RGBColor = RGBColor(0x22, 0x22, 0x22);
const FAINT: RGBColor = RGBColor(0xdd, 0xdd, 0xdd);
const SAVED: RGBColor = RGBColor(0xe3, 0xf1, 0xdf);
const ALL_GUESTS: RGBColor = RGBColor(0x4c, 0x8d, 0xc4);
/// Blues that differ in lightness, so that those who see no colours see them too.
const GUESTS: [RGBColor; 4] = [
    RGBColor(0x1f, 0x5f, 0x99),
    RGBColor(0x4c, 0x8d, 0xc4),
    RGBColor(0x8a, 0xb8, 0xdf),
    RGBColor(0xbc, 0xd7, 0xee),
];

/// What is drawn, in MiB and seconds.
struct Chart {
    /// Resident memory: the host's count.
    resident: Vec<(f64, f64)>,
    /// What guests take, the first ones at the bottom: each line is the sum of it
    /// and those below.
    stack: Vec<Vec<(f64, f64)>>,
    /// What they would take if nothing were merged.
    unmerged: Vec<(f64, f64)>,
    merging_since: Option<f64>,
    end: f64,
    top: f64,
}

#[allow(
    clippy::cast_precision_loss,
    reason = "drawn with a few hundred pixels"
)]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

impl Chart {
    fn new(timeline: &Timeline) -> Self {
        let at = |sample: &Sample| sample.at.as_secs_f64();
        let samples = timeline.samples();
        let resident: Vec<_> = samples.iter().map(|s| (at(s), mib(s.resident))).collect();
        let merging = || samples.iter().filter(|sample| !sample.saved.is_empty());
        let guests = timeline.guests();
        let below = |sample: &Sample, last: usize| -> f64 {
            let taken = guests.iter().zip(&sample.saved).take(last + 1);
            taken
                .map(|(all, saved)| mib(all.saturating_sub(*saved)))
                .sum()
        };
        let line = |last| merging().map(|s| (at(s), below(s, last))).collect();
        let all = mib(guests.iter().sum());
        let highest = resident.iter().map(|(_, y)| *y).fold(all, f64::max);
        Self {
            stack: (0..guests.len()).map(line).collect(),
            unmerged: merging().map(|s| (at(s), all)).collect(),
            merging_since: timeline.merging_since().map(|at| at.as_secs_f64()),
            end: resident.last().map_or(1.0, |(x, _)| *x).max(0.1),
            top: (highest * 1.08).max(1.0),
            resident,
        }
    }

    /// What the legend says, from the top down.
    fn legend(&self) -> Vec<Entry> {
        let last = |line: &[(f64, f64)]| line.last().map_or(0.0, |(_, y)| *y);
        let entry = |mark, words: String, mib| Entry {
            mark,
            words,
            mib: Some(mib),
        };
        let tops: Vec<f64> = self.stack.iter().map(|line| last(line)).collect();
        let together = tops.last().copied().unwrap_or(0.0);
        let mut entries = vec![entry(
            Mark::Line,
            "process".to_owned(),
            last(&self.resident),
        )];
        if self.merging_since.is_some() {
            let saved = last(&self.unmerged) - together;
            entries.push(entry(Mark::Area(SAVED), "saved".to_owned(), saved));
        }
        if !tops.is_empty() {
            let words = format!("{} guests together", tops.len());
            entries.push(entry(Mark::Stripes, words, together));
        }
        if tops.len() <= MAX_COLOURS {
            entries.extend((0..tops.len()).rev().map(|guest| {
                let bottom = guest.checked_sub(1).map_or(0.0, |below| tops[below]);
                let mark = Mark::Area(colour(guest, tops.len()));
                entry(mark, format!("guest {guest}"), tops[guest] - bottom)
            }));
        }
        if self.merging_since.is_some() {
            entries.push(Entry {
                mark: Mark::Dashes,
                words: "merging begins".to_owned(),
                mib: None,
            });
        }
        entries
    }
}

/// A line of the legend.
struct Entry {
    mark: Mark,
    words: String,
    /// At the end.
    mib: Option<f64>,
}

/// What stands in front of it.
enum Mark {
    Area(RGBColor),
    /// The areas of all guests.
    Stripes,
    Line,
    Dashes,
}

fn colour(guest: usize, guests: usize) -> RGBColor {
    match guests {
        0..=MAX_COLOURS => GUESTS[guest % GUESTS.len()],
        _ => ALL_GUESTS,
    }
}

/// The picture as SVG, with a line of words above it.
pub(crate) fn svg(timeline: &Timeline, caption: &str) -> anyhow::Result<String> {
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
    draw(&area, &Chart::new(timeline), caption)
        .map_err(|error| anyhow!("the picture cannot be drawn: {error}"))?;
    drop(area);
    Ok(svg)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn<'a> = Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>>;

fn draw<'a>(area: &Area<'a>, chart: &Chart, caption: &str) -> Drawn<'a> {
    area.fill(&WHITE)?;
    let caption_style = (FONT, 17).into_font().color(&INK);
    area.draw_text(caption, &caption_style, (24, 12))?;
    let (left, right) = area.margin(36, 8, 8, 0).split_horizontally(SIZE.0 - LEGEND);
    draw_chart(&left, chart)?;
    draw_legend(&right, chart)?;
    area.present()
}

fn draw_chart<'a>(area: &Area<'a>, chart: &Chart) -> Drawn<'a> {
    let mut context = ChartBuilder::on(area)
        .margin_right(16)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..chart.end, 0.0..chart.top)?;
    context
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(FAINT)
        .axis_style(INK)
        .x_labels(10)
        .y_labels(8)
        .x_label_formatter(&|seconds| label(*seconds, chart.end))
        .y_label_formatter(&|mib| label(*mib, chart.top))
        .label_style((FONT, 14).into_font().color(&INK))
        .axis_desc_style((FONT, 14).into_font().color(&INK))
        .x_desc("seconds")
        .y_desc("MiB")
        .draw()?;
    // From the top down: each area covers the lower part of the one before.
    let fill = |line: &[(f64, f64)], colour: RGBColor| AreaSeries::new(line.to_vec(), 0.0, colour);
    context.draw_series(fill(&chart.unmerged, SAVED))?;
    for (guest, line) in chart.stack.iter().enumerate().rev() {
        context.draw_series(fill(line, colour(guest, chart.stack.len())))?;
    }
    context.draw_series(LineSeries::new(chart.resident.clone(), INK.stroke_width(2)))?;
    if let Some(since) = chart.merging_since {
        let line = [(since, 0.0), (since, chart.top)];
        context.draw_series(DashedLineSeries::new(line, 4, 4, INK.stroke_width(1)))?;
    }
    Ok(())
}

/// A number beside an axis that ends at `end`.
fn label(number: f64, end: f64) -> String {
    if end < 5.0 {
        format!("{number:.1}")
    } else {
        format!("{number:.0}")
    }
}

fn draw_legend<'a>(area: &Area<'a>, chart: &Chart) -> Drawn<'a> {
    let style = (FONT, 14).into_font().color(&INK);
    let number = style.pos(Pos::new(HPos::Right, VPos::Top));
    let right = i32::try_from(LEGEND).unwrap_or(i32::MAX) - 24;
    area.draw_text("MiB at the end", &number, (right, 2))?;
    for (row, entry) in (1..).zip(chart.legend()) {
        let y = row * LINE;
        draw_mark(area, &entry.mark, y)?;
        area.draw_text(&entry.words, &style, (MARK + 8, y + 2))?;
        if let Some(mib) = entry.mib {
            area.draw_text(&format!("{mib:.0}"), &number, (right, y + 2))?;
        }
    }
    Ok(())
}

fn draw_mark<'a>(area: &Area<'a>, mark: &Mark, y: i32) -> Drawn<'a> {
    let block = |top, bottom, colour: RGBColor| {
        Rectangle::new([(0, y + top), (MARK, y + bottom)], colour.filled())
    };
    match *mark {
        Mark::Area(colour) => area.draw(&block(2, 14, colour)),
        Mark::Stripes => {
            let stripes = (0..).zip(GUESTS.iter().rev());
            for (at, colour) in stripes {
                area.draw(&block(2 + 3 * at, 5 + 3 * at, *colour))?;
            }
            Ok(())
        }
        Mark::Line => {
            let line = vec![(0, y + 8), (MARK, y + 8)];
            area.draw(&PathElement::new(line, INK.stroke_width(2)))
        }
        Mark::Dashes => {
            for top in [1, 7, 13] {
                let dash = vec![(MARK / 2, y + top), (MARK / 2, y + top + 4)];
                area.draw(&PathElement::new(dash, INK.stroke_width(1)))?;
            }
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_names_what_it_shows() {
        let mut timeline = Timeline::new();
        timeline.sample(1 << 20, Vec::new(), false);
        timeline.begin_work(vec![64 << 20, 32 << 20], true);
        timeline.sample(97 << 20, vec![0, 0], false);
        timeline.sample(50 << 20, vec![40 << 20, 8 << 20], true);
        let svg = svg(&timeline, "a caption").unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        let texts: Vec<_> = svg.lines().map(str::trim).collect();
        for words in [
            "a caption",
            "seconds",
            "MiB",
            "guest 0",
            "guest 1",
            "2 guests together",
            "process",
            // Saved, the guests, together, the process.
            "saved",
            "48",
            "24",
        ] {
            assert!(texts.contains(&words), "{words} in {svg}");
        }
        assert_eq!(texts.iter().filter(|text| **text == "48").count(), 2);
    }

    #[test]
    fn many_guests_and_none_can_be_drawn() {
        svg(&Timeline::new(), "").unwrap();
        let mut timeline = Timeline::new();
        timeline.begin_work(vec![1 << 20; 64], false);
        timeline.sample(64 << 20, vec![1 << 19; 64], true);
        let svg = svg(&timeline, "").unwrap();
        assert!(svg.contains("64 guests together") && !svg.contains("guest 7"));
        assert!(!svg.contains("saved") && !svg.contains("merging"));
    }
}
