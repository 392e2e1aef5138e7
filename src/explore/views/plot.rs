//! The number of changes over the window, by kind.

use crate::base::time::rfc3339;
use crate::error::{Reason, Result};
use crate::explore::index::{Index, Version};
use crate::explore::kinds::KindId;
use crate::objects::resource::Resource;
use chrono::DateTime;
use serde::Serialize;
use std::collections::HashMap;

/// The most bars of the plot.
const MAX_BARS: usize = 1000;
/// The kinds of the plot that have bars of their own; the others share one.
const PLOT_KINDS: usize = 6;

/// The number of changes over the window.
#[derive(Debug, Serialize)]
pub(in crate::explore) struct Density {
    /// Where each bar begins: a time, or a revision if no times are known. One more than bars.
    edges: Vec<String>,
    /// The bars of each kind, those with most changes in the whole window first: of any range, the same kinds.
    kinds: Vec<Bars>,
    /// The number of deletions in each bar, but those of Events and Leases.
    deleted: Vec<u32>,
    /// Where changes are missing: begin and end, as edges.
    gaps: Vec<[String; 2]>,
}

/// The bars of a kind.
#[derive(Debug, Serialize)]
pub(in crate::explore) struct Bars {
    /// The kind; null for all others together.
    kind: Option<String>,
    /// The number of changes in each bar.
    counts: Vec<u32>,
}

impl Density {
    /// Counts the changes in `bars` equal parts of the window, or of a range of it: two edges of an answer before.
    ///
    /// # Errors
    /// `Usage` if the range is none.
    pub(in crate::explore) fn of(
        index: &Index,
        bars: usize,
        range: Option<(&str, &str)>,
    ) -> Result<Self> {
        let bars = bars.clamp(1, MAX_BARS);
        let times = index.moments().first().zip(index.moments().last());
        let times = times.filter(|(first, last)| first.time < last.time);
        let (from, to) = match times {
            Some((first, last)) => (first.time.timestamp_millis(), last.time.timestamp_millis()),
            None => (index.first.0, index.coverage.newest.0),
        };
        let edge = |text: &str| {
            let edge = if times.is_some() {
                let time = DateTime::parse_from_rfc3339(text);
                time.ok().map(|time| time.timestamp_millis())
            } else {
                text.parse().ok()
            };
            let none = || Reason::Usage.error(format!("\"{text}\" is no edge of the plot"));
            Ok(edge.ok_or_else(none)?.clamp(from, to))
        };
        let (from, to) = match range {
            Some((first, last)) => (edge(first)?, edge(last)?),
            None => (from, to),
        };
        let width = to.saturating_sub(from).max(1) as f64;
        let bar_of = |version: &Version| {
            let at = match times {
                Some(_) => index.time_of(version.revision)?.timestamp_millis(),
                None => version.revision.0,
            };
            let share = (at - from) as f64 / width;
            (0.0..=1.0)
                .contains(&share)
                .then(|| ((share * bars as f64) as usize).min(bars - 1))
        };
        let mut counts: HashMap<Option<KindId>, (usize, Vec<u32>)> = HashMap::new();
        let mut deleted = vec![0; bars];
        for key in &index.keys {
            let empty = || (0, vec![0; bars]);
            let (total, counts) = counts.entry(key.kind).or_insert_with(empty);
            let versions = index.versions(key);
            *total += versions.len();
            let kind = key.kind.and_then(|kind| index.kinds.resource(kind));
            let is_frequent = kind.is_some_and(Resource::changes_all_the_time);
            for version in versions {
                let Some(bar) = bar_of(version) else {
                    continue;
                };
                counts[bar] += 1;
                deleted[bar] += u32::from(version.is_deletion() && !is_frequent);
            }
        }
        let name = |id: Option<KindId>| {
            let kind = id.and_then(|id| index.kinds.get(id));
            kind.map_or_else(|| "other keys".to_owned(), |kind| kind.kind.clone())
        };
        let mut kinds: Vec<(usize, Bars)> = counts
            .into_iter()
            .map(|(id, (total, counts))| {
                let kind = Some(name(id));
                (total, Bars { kind, counts })
            })
            .collect();
        kinds.sort_by_key(|(total, bars)| (std::cmp::Reverse(*total), bars.kind.clone()));
        let mut kinds: Vec<Bars> = kinds.into_iter().map(|(_, bars)| bars).collect();
        if kinds.len() > PLOT_KINDS {
            let rest = kinds.split_off(PLOT_KINDS);
            let mut counts = vec![0; bars];
            for other in rest {
                counts
                    .iter_mut()
                    .zip(other.counts)
                    .for_each(|(sum, n)| *sum += n);
            }
            kinds.push(Bars { kind: None, counts });
        }
        let edges = (0..=bars).map(|bar| {
            let at = from + (width * bar as f64 / bars as f64) as i64;
            match times {
                Some(_) => DateTime::from_timestamp_millis(at).map_or_else(String::new, rfc3339),
                None => at.to_string(),
            }
        });
        Ok(Density {
            edges: edges.collect(),
            kinds,
            deleted,
            gaps: gaps(index, times.is_some()),
        })
    }
}

/// Returns the begin and the end of each gap, as times or as revisions.
fn gaps(index: &Index, has_times: bool) -> Vec<[String; 2]> {
    let mut gaps = Vec::new();
    for &(first, last) in &index.unknown {
        let moments = index.moments();
        let before = moments.partition_point(|m| m.revision < first);
        let after = moments.partition_point(|m| m.revision < last);
        let before = moments.get(before.saturating_sub(1));
        let after = moments.get(after).or(moments.last());
        match (has_times, before.zip(after)) {
            (true, Some((before, after))) => {
                gaps.push([rfc3339(before.time), rfc3339(after.time)]);
            }
            _ => gaps.push([first.to_string(), last.to_string()]),
        }
    }
    gaps
}
