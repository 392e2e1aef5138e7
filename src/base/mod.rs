//! Small general-purpose modules: parsers, temporary files, limits, retries.
//!
//! Every other module may use them. They themselves use only [`crate::error`].

pub mod byte_size;
pub mod cancel;
pub mod causes;
pub mod duration;
pub(crate) mod external_sort;
pub mod fixed_record;
pub mod flag_values;
pub mod hash;
pub mod limits;
pub mod mounted_secret;
pub mod mutex;
pub mod opt;
pub mod optional_file;
pub(crate) mod parallel;
pub mod percent;
pub(crate) mod plural;
pub(crate) mod printable;
pub mod protobuf;
pub mod random;
pub mod read_all;
pub mod read_at;
pub mod retry;
pub mod shell;
pub(crate) mod shorten;
pub(crate) mod slips;
pub(crate) mod tee;
pub mod temp;
pub mod text_value;
pub mod time;
pub mod tls;

pub use byte_size::Size;
pub use cancel::Cancel;
pub use duration::Span;
pub use mutex::{lock, unpoisoned};
pub use optional_file::none_if_missing;
pub use read_at::{ReadAt, Sequential};
pub(crate) use tee::Tee;
pub use text_value::TextValue;
