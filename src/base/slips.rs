//! Slips in names: what was probably meant.

/// Returns the name that differs by the fewest slips, if these are few enough.
pub(crate) fn nearest<S: AsRef<str>>(name: &str, known: impl IntoIterator<Item = S>) -> Option<S> {
    // In a short name, two slips make another word.
    let most = match name.chars().count() {
        0..=3 => 0,
        4..=7 => 1,
        _ => 2,
    };
    let slips = known.into_iter().map(|k| (distance(name, k.as_ref()), k));
    slips
        .filter(|(slips, _)| *slips <= most)
        .min_by_key(|(slips, _)| *slips)
        .map(|(_, k)| k)
}

/// The number of slips from one name to another: a letter too many, too few or wrong, or two letters swapped.
pub(crate) fn distance(a: &str, b: &str) -> usize {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut rows = vec![(0..=b.len()).collect::<Vec<usize>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let above = &rows[i - 1];
            let wrong = above[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = wrong.min(above[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}
