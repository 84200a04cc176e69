//! Who shares with whom.

use crate::count::Counted;

/// For each pair of images how many contents they have in common, zeros apart:
/// the pages that the two save by sharing with each other. On the diagonal, how
/// many an image saves by sharing with itself.
pub(crate) fn matrix(counted: &Counted) -> anyhow::Result<Vec<Vec<u64>>> {
    let images = counted.images.len();
    let mut matrix = vec![vec![0; images]; images];
    // Which row, and which cell of it, each content was counted in last.
    let mut marks = vec![(0, 0); usize::try_from(counted.distinct)? + 1];
    for (number, row) in counted.images.iter().enumerate() {
        let nonzero = || row.iter().flatten();
        for content in nonzero() {
            let mark = &mut marks[content.get() as usize];
            matrix[number][number] += u64::from(mark.0 == number + 1);
            *mark = (number + 1, number + 1);
        }
        for (other, column) in counted.images.iter().enumerate().skip(number + 1) {
            for content in column.iter().flatten() {
                let mark = &mut marks[content.get() as usize];
                if mark.0 == number + 1 && mark.1 != other + 1 {
                    mark.1 = other + 1;
                    matrix[number][other] += 1;
                }
            }
            matrix[other][number] = matrix[number][other];
        }
    }
    Ok(matrix)
}
