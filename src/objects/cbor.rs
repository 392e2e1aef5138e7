//! Decodes the CBOR of custom resources (KEP-4222) to JSON, as apimachinery's `runtime/serializer/cbor` does.
//!
//! Strings are encoded as byte strings, and bytes as byte strings with a tag that says how JSON shows them (RFC 8949,
//! 3.4.5.2).

use super::{MAX_DEPTH, MAX_NODES, NotDecoded};
use base64_simd::{STANDARD, URL_SAFE_NO_PAD};
use minicbor::Decoder;
use minicbor::data::{IanaTag, Tag, Type};
use serde_json::{Map, Value};

/// Decodes a value.
///
/// # Errors
/// Fails with the reason why it cannot be decoded.
pub(super) fn decode(cbor: &[u8]) -> Result<Value, NotDecoded> {
    let mut decoder = CborDecoder {
        cbor: Decoder::new(cbor),
        nodes_left: MAX_NODES,
    };
    let value = decoder.value(0)?;
    if decoder.cbor.position() < cbor.len() {
        return Err(NotDecoded::damaged("bytes follow the CBOR"));
    }
    Ok(value)
}

struct CborDecoder<'b> {
    cbor: Decoder<'b>,
    /// Elements that the object may still have.
    nodes_left: usize,
}

impl CborDecoder<'_> {
    fn value(&mut self, depth: usize) -> Result<Value, NotDecoded> {
        self.nodes_left = self.nodes_left.checked_sub(1).ok_or(NotDecoded::TooLarge)?;
        if depth > MAX_DEPTH {
            return Err(NotDecoded::TooLarge);
        }
        Ok(match self.cbor.datatype()? {
            Type::Bool => self.cbor.bool()?.into(),
            Type::Null => {
                self.cbor.null()?;
                Value::Null
            }
            Type::U8 | Type::U16 | Type::U32 | Type::U64 => self.cbor.u64()?.into(),
            Type::I8 | Type::I16 | Type::I32 | Type::I64 | Type::Int => self.cbor.i64()?.into(),
            Type::F16 | Type::F32 | Type::F64 => self.cbor.f64()?.into(),
            Type::Bytes | Type::BytesIndef | Type::String | Type::StringIndef => {
                self.text()?.into()
            }
            Type::Array | Type::ArrayIndef => {
                let mut left = self.cbor.array()?;
                let mut list = Vec::new();
                while self.has_next(&mut left)? {
                    list.push(self.value(depth + 1)?);
                }
                list.into()
            }
            Type::Map | Type::MapIndef => {
                let mut left = self.cbor.map()?;
                let mut map = Map::new();
                while self.has_next(&mut left)? {
                    let key = self.text()?;
                    map.insert(key, self.value(depth + 1)?);
                }
                map.into()
            }
            Type::Tag => {
                let tag = self.cbor.tag()?;
                self.tagged(tag, depth + 1)?
            }
            other => {
                return Err(NotDecoded::damaged(format!(
                    "the CBOR has a value of type {other}, which JSON has not"
                )));
            }
        })
    }

    /// Whether another element follows. `left` is the number of elements that are left, if it is known.
    fn has_next(&mut self, left: &mut Option<u64>) -> Result<bool, NotDecoded> {
        match left {
            Some(0) => Ok(false),
            Some(left) => {
                *left -= 1;
                Ok(true)
            }
            None if self.cbor.datatype()? == Type::Break => {
                self.cbor.set_position(self.cbor.position() + 1);
                Ok(false)
            }
            None => Ok(true),
        }
    }

    fn tagged(&mut self, tag: Tag, depth: usize) -> Result<Value, NotDecoded> {
        Ok(match tag.try_into() {
            Ok(IanaTag::ToBase64) => STANDARD.encode_to_string(self.bytes()?).into(),
            Ok(IanaTag::ToBase64Url) => URL_SAFE_NO_PAD.encode_to_string(self.bytes()?).into(),
            // The tag of CBOR itself, and that of a time as text, change nothing.
            _ => self.value(depth)?,
        })
    }

    /// Decodes a string, which may be encoded as bytes, and in several pieces.
    fn text(&mut self) -> Result<String, NotDecoded> {
        let bytes = match self.cbor.datatype()? {
            Type::String | Type::StringIndef => {
                let pieces = self.cbor.str_iter()?;
                return Ok(pieces.collect::<Result<String, _>>()?);
            }
            _ => self.bytes()?,
        };
        String::from_utf8(bytes).map_err(|_| NotDecoded::damaged("a string of CBOR is not UTF-8"))
    }

    fn bytes(&mut self) -> Result<Vec<u8>, NotDecoded> {
        let pieces: Result<Vec<&[u8]>, _> = self.cbor.bytes_iter()?.collect();
        Ok(pieces?.concat())
    }
}

impl From<minicbor::decode::Error> for NotDecoded {
    fn from(e: minicbor::decode::Error) -> Self {
        NotDecoded::Damaged(format!("the CBOR is damaged: {e}"))
    }
}
