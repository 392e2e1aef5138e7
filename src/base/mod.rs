//! The ground floor: small things that every room may use.
//!
//! Nothing here uses anything of ours but [`crate::error`].

pub mod cancel;
pub mod causes;
mod lock;
pub mod pieces;
pub mod read_at;

pub use cancel::Cancel;
pub use lock::lock;
pub use read_at::ReadAt;
