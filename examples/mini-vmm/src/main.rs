#![deny(unsafe_code)]
#![allow(dead_code)]
//! mini
mod content;
mod cpu;
mod host_cpu;
mod kvm_slots;
mod layout;
mod payload;
mod plan;
mod ram;
mod recipe;
mod verify;
mod vm;
fn main() {}
