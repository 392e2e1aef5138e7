//! The evidence about timelines that was read for earlier plans, under the indexes of the current catalog.
//!
//! Reads nothing itself. Called by `ops::gc::plan`.

use crate::backup::Catalog;
use crate::backup::survey::{Comparison, Continuity, Held};
use crate::backup::timeline::Evidence;
use crate::error::{Error, Result};
use crate::mvcc::Revision;
use crate::prefix::scan::Contents;
use std::collections::HashMap;

/// Contents of snapshots, and the indexes by which they know the snapshots of these paths.
pub(super) struct EarlierContents<'a> {
    pub(super) contents: &'a Contents,
    pub(super) paths: &'a HashMap<String, usize>,
}

/// Answers questions about the snapshots of the current catalog from contents that were read earlier.
pub(super) struct EarlierEvidence<'a> {
    contents: Option<&'a Contents>,
    /// Indexes in `contents`, by the index in the current catalog.
    earlier: HashMap<usize, usize>,
}

impl<'a> EarlierEvidence<'a> {
    /// Returns the evidence about `doubtful`, which are indexes in `catalog`.
    pub(super) fn new(
        read: Option<EarlierContents<'a>>,
        catalog: &Catalog,
        doubtful: &[usize],
    ) -> Self {
        let mut earlier = HashMap::new();
        if let Some(read) = &read {
            for &i in doubtful {
                if let Some(&index) = read.paths.get(&catalog.snapshots[i].path) {
                    earlier.insert(i, index);
                }
            }
        }
        EarlierEvidence {
            contents: read.map(|r| r.contents),
            earlier,
        }
    }

    fn find(&self, i: usize) -> Option<(&Contents, usize)> {
        Some((self.contents?, *self.earlier.get(&i)?))
    }

    /// Returns why a snapshot could not be read; `None` if it was read, or reading was not attempted.
    pub(super) fn why_unreadable(&self, i: usize) -> Option<&Error> {
        let (contents, i) = self.find(i)?;
        contents.unreadable.get(&i)
    }
}

impl Evidence for EarlierEvidence<'_> {
    fn held(&self, snapshot: usize) -> Option<Held> {
        let (contents, i) = self.find(snapshot)?;
        contents.held(i)
    }

    fn compare(&self, a: usize, b: usize) -> Result<Comparison> {
        match (self.find(a), self.find(b)) {
            (Some((contents, a)), Some((_, b))) => contents.compare(a, b),
            _ => Ok(Comparison::default()),
        }
    }

    fn continuity(&self, before: usize, until: Revision, after: usize) -> Result<Continuity> {
        match (self.find(before), self.find(after)) {
            (Some((contents, before)), Some((_, after))) => {
                contents.continuity(before, until, after)
            }
            _ => Ok(Continuity::Unknown),
        }
    }

    fn fingerprint(&self, snapshot: usize, revision: Revision) -> Result<String> {
        match self.find(snapshot) {
            Some((contents, i)) => contents.fingerprint(i, revision),
            None => Err(Error::internal("a fork at a snapshot that was not read")),
        }
    }

    fn last(&self, snapshot: usize) -> Option<Revision> {
        self.find(snapshot)
            .and_then(|(contents, i)| contents.last(i))
    }

    fn is_unreadable(&self, snapshot: usize) -> bool {
        self.why_unreadable(snapshot).is_some()
    }

    fn was_read(&self, snapshot: usize) -> bool {
        self.find(snapshot)
            .is_some_and(|(contents, i)| contents.was_read(i))
    }
}
