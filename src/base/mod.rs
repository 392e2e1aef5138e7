//! The ground floor: small things that every room may use.
//!
//! Nothing here uses anything of ours but [`crate::error`].

pub mod cancel;
pub mod causes;
pub mod read_at;
pub mod words;

pub use cancel::Cancel;
pub use read_at::ReadAt;
