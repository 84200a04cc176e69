//! The Linux backend.
