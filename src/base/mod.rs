//! The ground floor: small things that every room may use.
//!
//! Nothing here uses anything of ours but [`crate::error`].

pub mod cancel;
pub mod causes;
pub mod duration;
pub mod flag;
pub mod hash;
pub mod if_there;
pub mod mounted;
pub mod mutex;
pub mod percent;
pub mod pieces;
pub mod quantity;
pub mod random;
pub mod read_at;
pub mod retry;
pub mod words;
pub mod written;

pub use cancel::Cancel;
pub use duration::Span;
pub use if_there::if_there;
pub use mutex::{lock, unpoisoned};
pub use quantity::Size;
pub use read_at::ReadAt;
pub use written::Written;
