//! Domains and address spaces that come and go at the same time.

use loom::sync::Arc;
use loom::thread;

use super::Layout;
use crate::backend::Backend;
use crate::backend::sim::{SimBackend, SimConfig};
use crate::domain::Domain;
use crate::error::Error;
use crate::fingerprint::Keys;

/// A space is in a domain that is there, or there is no space.
#[test]
fn loom_no_space_comes_to_a_domain_that_goes() {
    loom::model(|| {
        let layout = Arc::new(Layout::<SimBackend>::default());
        let store = SimBackend::new(SimConfig::default()).open_store().unwrap();
        let keys = Keys::new(Some([0; 32])).unwrap();
        let domain = layout.add_domain(|id| Domain::new(id, keys, store));
        let adding = thread::spawn({
            let layout = Arc::clone(&layout);
            move || layout.add_space(domain)
        });
        let removed = layout.remove_domain(domain);
        match (adding.join().unwrap(), removed) {
            (Ok(space), Err(Error::DomainInUse(_))) => {
                assert_eq!(layout.spaces(), [(space, domain)]);
            }
            (Err(Error::NoDomain(_)), Ok(())) => assert_eq!(layout.spaces(), []),
            other => panic!("{other:?}"),
        }
    });
}
