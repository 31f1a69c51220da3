//! The safetensors container: a length, a JSON header of that length, the bytes of the tensors.

use std::collections::HashSet;
use std::fmt;
use std::io::Read;

use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, Visitor};

use super::TraceError;

/// The longest header that is read, the same limit that the reference implementation has.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The key of the header's free text, beside which all other keys are tensors.
const METADATA_KEY: &str = "__metadata__";

/// A file whose header was checked against itself and against the length of its data.
pub(super) struct Container {
    metadata: Metadata,
    data: Vec<u8>,
}

/// One tensor: its type, its shape and exactly its bytes.
pub(super) struct Tensor<'a> {
    pub(super) dtype: Dtype,
    pub(super) shape: &'a [usize],
    pub(super) bytes: &'a [u8],
}

impl Container {
    /// Reads the header, then as much data as it describes, then makes sure that the file ends.
    pub(super) fn read(mut reader: impl Read, file: &str) -> Result<Self, TraceError> {
        let invalid = |reason: String| TraceError::NotSafetensors { file: file.to_owned(), reason };
        let truncated = |part, expected, found: usize| {
            let file = file.to_owned();
            TraceError::Truncated { file, part, expected, found: found as u64 }
        };
        let mut take = |length| read_up_to(&mut reader, length, file);

        let Ok(length) = <[u8; 8]>::try_from(take(8)?) else {
            return Err(invalid("it is shorter than the 8 bytes with which one starts".into()));
        };
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER_BYTES {
            return Err(invalid(format!("it would have a header of {length} bytes")));
        }
        let header = take(length)?;
        if header.first() != Some(&b'{') {
            return Err(invalid("its header is not a JSON object".into()));
        }
        if (header.len() as u64) < length {
            return Err(truncated("header", length, header.len()));
        }
        let header = str::from_utf8(&header).map_err(|error| invalid(error.to_string()))?;
        // The reference parser takes the last of two equal keys; which was meant is not ours to
        // guess. This pass only looks at keys, the next one at everything else.
        serde_json::from_str::<DistinctKeys>(header).map_err(|error| invalid(error.to_string()))?;
        let metadata: Metadata =
            serde_json::from_str(header).map_err(|error| invalid(error.to_string()))?;

        let expected = metadata.data_len() as u64;
        let data = take(expected.saturating_add(1))?;
        match (data.len() as u64).cmp(&expected) {
            std::cmp::Ordering::Equal => Ok(Self { metadata, data }),
            std::cmp::Ordering::Less => Err(truncated("data", expected, data.len())),
            std::cmp::Ordering::Greater => {
                Err(invalid(format!("bytes follow the {expected} that its tensors occupy")))
            }
        }
    }

    /// A string of the metadata.
    pub(super) fn text(&self, key: &str) -> Option<&str> {
        self.metadata.metadata().as_ref()?.get(key).map(String::as_str)
    }

    /// The tensor called `name`.
    pub(super) fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let info = self.metadata.info(name)?;
        let (start, end) = info.data_offsets;
        Some(Tensor { dtype: info.dtype, shape: &info.shape, bytes: self.data.get(start..end)? })
    }

    /// The names of all tensors, in the order of their data.
    pub(super) fn names(&self) -> Vec<String> {
        self.metadata.offset_keys()
    }
}

/// At most `length` bytes; memory grows with the bytes that come, not with the `length` claimed.
fn read_up_to(reader: &mut impl Read, length: u64, file: &str) -> Result<Vec<u8>, TraceError> {
    let mut bytes = Vec::new();
    match reader.by_ref().take(length).read_to_end(&mut bytes) {
        Ok(_) => Ok(bytes),
        Err(source) => Err(TraceError::Read { file: file.to_owned(), source }),
    }
}

/// A JSON object in which no key occurs twice, nor in the metadata inside it.
struct DistinctKeys;

impl<'de> Deserialize<'de> for DistinctKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(DistinctKeys)
    }
}

impl<'de> Visitor<'de> for DistinctKeys {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self, A::Error> {
        let mut seen = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            if key == METADATA_KEY {
                map.next_value::<DistinctKeys>()?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
            if seen.contains(&key) {
                return Err(A::Error::custom(format_args!("the key {key:?} occurs twice")));
            }
            seen.insert(key);
        }
        Ok(self)
    }
}
