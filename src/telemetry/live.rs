//! A live line on the terminal, for a command that runs until it is stopped.
//!
//! Without a terminal on standard error nothing is shown: the logs have the same events.

use super::progress::BARS;
use crate::base::printable;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;

/// The live line, and the lines above it that stay.
#[derive(Debug, Default)]
pub struct LiveLine(Option<ProgressBar>);

impl LiveLine {
    /// Begins a live line if standard error is a terminal.
    pub fn begin() -> Self {
        if !std::io::stderr().is_terminal() {
            return LiveLine(None);
        }
        let bar = BARS.add(ProgressBar::new_spinner());
        if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg}") {
            bar.set_style(style);
        }
        LiveLine(Some(bar))
    }

    /// Shows a text in the live line. It is computed only if the line is visible.
    pub fn set(&self, text: impl FnOnce() -> String) {
        if let Some(bar) = &self.0 {
            bar.set_message(printable::line(&text()).into_owned());
            bar.tick();
        }
    }

    /// Prints lines that stay, above the live line. They are computed only if the line is visible.
    pub fn print(&self, lines: impl FnOnce() -> Vec<String>) {
        if self.0.is_some() {
            for line in lines() {
                // Ignore a failure: the work goes on without a terminal.
                let _ = BARS.println(printable::line(&line));
            }
        }
    }
}

impl Drop for LiveLine {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
