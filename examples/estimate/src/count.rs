//! Which pages are equal: every page of every image by its content's number.

use std::sync::Arc;

use ksm_core::census::{Census, ContentId};

use crate::image::Image;
use crate::progress;

/// Pages that are fingerprinted at once.
const BATCH: usize = 256;

/// A page's content; `None` for zeros. Four bytes.
pub(crate) type Content = Option<ContentId>;

/// All images, page by page.
#[derive(Debug)]
pub(crate) struct Counted {
    pub(crate) images: Vec<Arc<[Content]>>,
    /// Different contents in all of them, zeros apart.
    pub(crate) distinct: u64,
}

/// Reads all images, once.
pub(crate) fn count(images: &[Image]) -> anyhow::Result<Counted> {
    let mut census = Census::new(None)?;
    let bar = progress::bar("reading", images.iter().map(Image::pages).sum());
    let mut counted = Vec::with_capacity(images.len());
    for image in images {
        let mut contents = Vec::with_capacity(usize::try_from(image.pages())?);
        image.read(BATCH, |pages| {
            contents.extend(census.count(pages)?);
            bar.inc(pages.len() as u64);
            Ok(())
        })?;
        counted.push(contents.into());
    }
    bar.finish_and_clear();
    Ok(Counted {
        images: counted,
        distinct: census.distinct(),
    })
}
