//! Percent-encoding for requests to S3, Swift and Google Cloud Storage.
//!
//! All characters are encoded except the unreserved ones of RFC 3986.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

const RESERVED: AsciiSet = NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');
const RESERVED_IN_PATH: AsciiSet = RESERVED.remove(b'/');

/// Encodes a part of a query, or one segment of a path.
pub fn encoded(text: &str) -> String {
    utf8_percent_encode(text, &RESERVED).to_string()
}

/// Encodes a path and keeps its slashes.
pub fn encoded_path(path: &str) -> String {
    utf8_percent_encode(path, &RESERVED_IN_PATH).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unreserved_characters_are_not_encoded() {
        assert_eq!(encoded_path("a b/ü%"), "a%20b/%C3%BC%25");
        assert_eq!(encoded("A-z_0.9~/+&="), "A-z_0.9~%2F%2B%26%3D");
    }
}
