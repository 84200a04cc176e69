//! [`Ports`]: the devices that a Linux guest finds at its I/O ports, besides
//! those that KVM itself has (interrupt controllers, timer, speaker port).

use std::cell::Cell;
use std::io;

use vm_superio::serial::NoEvents;
use vm_superio::{I8042Device, Serial, Trigger};
use vmm_sys_util::eventfd::EventFd;

use super::console::Console;

/// The first serial line, COM1.
pub(super) const SERIAL: u16 = 0x3f8;
const SERIAL_LAST: u16 = SERIAL + 7;
/// Its interrupt line.
pub(super) const SERIAL_IRQ: u32 = 4;
/// The keyboard controller, which can reset the machine (`reboot=k`).
const KEYBOARD: u16 = 0x60;
const KEYBOARD_LAST: u16 = KEYBOARD + 4;
/// The speaker port, where KVM does not have it: the timer's output is high.
const SPEAKER: u16 = 0x61;
const TIMER_OUTPUT: u8 = 0x20;
/// Data of a PC's clock, which is not there. It must not look busy, or Linux waits for
/// it, for seconds.
const CLOCK: u16 = 0x71;
const IDLE: u8 = 0;
/// The chipset's reset control (`reboot=p`), and the bit that does it.
const RESET_CONTROL: u16 = 0xcf9;
const RESET: u8 = 4;
/// What is read where there is no device.
const NOTHING: u8 = 0xff;

/// A line to the guest's interrupt controller.
#[derive(Debug)]
pub(super) struct Interrupt(pub(super) EventFd);

impl Trigger for Interrupt {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Whether the machine is to be reset.
#[derive(Debug, Default)]
struct ResetLine(Cell<bool>);

impl Trigger for ResetLine {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.set(true);
        Ok(())
    }
}

/// A guest's devices.
#[derive(Debug)]
pub(super) struct Ports {
    serial: Serial<Interrupt, NoEvents, Console>,
    keyboard: I8042Device<ResetLine>,
}

impl Ports {
    /// Devices of a guest with this console.
    pub(super) fn new(interrupt: Interrupt, console: Console) -> Self {
        Self {
            serial: Serial::new(interrupt, console),
            keyboard: I8042Device::new(ResetLine::default()),
        }
    }

    /// The guest has written. Returns whether that resets the machine.
    ///
    /// # Errors
    /// When the console cannot be written to, or the interrupt not be raised.
    pub(super) fn write(&mut self, port: u16, bytes: &[u8]) -> anyhow::Result<bool> {
        for &byte in bytes {
            match port {
                SERIAL..=SERIAL_LAST => self
                    .serial
                    .write(offset(port, SERIAL), byte)
                    .map_err(|error| anyhow::anyhow!("serial line: {error}"))?,
                KEYBOARD..=KEYBOARD_LAST => self.keyboard.write(offset(port, KEYBOARD), byte)?,
                RESET_CONTROL if byte & RESET != 0 => return Ok(true),
                _ => {}
            }
        }
        Ok(self.keyboard.reset_evt().0.get())
    }

    /// The guest reads.
    pub(super) fn read(&mut self, port: u16, bytes: &mut [u8]) {
        for byte in bytes {
            *byte = match port {
                SERIAL..=SERIAL_LAST => self.serial.read(offset(port, SERIAL)),
                SPEAKER => TIMER_OUTPUT,
                CLOCK => IDLE,
                KEYBOARD..=KEYBOARD_LAST => self.keyboard.read(offset(port, KEYBOARD)),
                _ => NOTHING,
            };
        }
    }
}

fn offset(port: u16, base: u16) -> u8 {
    u8::try_from(port - base).expect("a device has a few ports")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linux::console::Marks;
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    fn ports() -> (Ports, EventFd, std::sync::Arc<crate::linux::console::Watch>) {
        let marks = Marks {
            boot: Some("up".to_owned()),
            beat: None,
        };
        let console = Console::open(0, None, marks).unwrap();
        let watch = console.watch();
        let line = EventFd::new(EFD_NONBLOCK).unwrap();
        let other_end = line.try_clone().unwrap();
        (Ports::new(Interrupt(line), console), other_end, watch)
    }

    #[test]
    fn what_is_sent_is_on_the_console_and_interrupts() {
        let (mut ports, line, watch) = ports();
        assert!(!ports.write(SERIAL, b"u").unwrap());
        assert!(line.read().is_err(), "interrupts are off");
        // Transmitter empty.
        ports.write(SERIAL + 1, &[2]).unwrap();
        assert!(!ports.write(SERIAL, b"p").unwrap());
        assert!(line.read().is_ok());
        assert!(watch.has_booted());
        let mut status = [0];
        ports.read(SERIAL + 5, &mut status);
        assert_eq!(status[0] & 0x60, 0x60, "ready for more");
    }

    #[test]
    fn there_are_two_ways_to_reset() {
        for (port, idle, reset) in [(0x64, 0xae, 0xfe), (0xcf9, 2, 6)] {
            let (mut ports, ..) = ports();
            assert!(!ports.write(port, &[idle]).unwrap(), "{port:#x}");
            assert!(ports.write(port, &[reset]).unwrap(), "{port:#x}");
        }
    }

    #[test]
    fn where_there_is_no_device_all_bits_are_set() {
        let (mut ports, ..) = ports();
        let mut bytes = [0; 2];
        ports.read(0x2f8, &mut bytes);
        assert_eq!(bytes, [NOTHING; 2]);
        ports.read(0x61, &mut bytes[..1]);
        assert_eq!(bytes[0], TIMER_OUTPUT);
        ports.read(0x64, &mut bytes[..1]);
        assert_eq!(bytes[0], 0, "the controller can be written to");
        assert!(!ports.write(0x80, &[1]).unwrap());
    }
}
