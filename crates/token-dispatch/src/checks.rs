//! Checks of arguments, before anything is queued.

use std::fmt;

use ep_context::{Backend, DeviceSlice, RowBuffer};

use crate::dispatch::{Dispatch, Sent};
use crate::error::DispatchError;
use crate::handle::Handle;
use crate::lane::Lane;

impl<B: Backend> Lane<B> {
    pub(crate) fn check_dispatch<'a>(
        &self,
        args: &Dispatch<'_, 'a, B>,
        tokens: usize,
        word: Option<&DeviceSlice<'a, B>>,
    ) -> Result<(), DispatchError> {
        const OP: &str = "dispatch";
        let g = &self.dispatcher().inner.geometry;
        let top_k = g.top_k as usize;
        if tokens > g.max_tokens as usize {
            let limit =
                format!("at most {}, the tokens that the lanes were made for", g.max_tokens);
            return Err(self.argument(OP, "number of tokens", tokens, limit));
        }
        let least = tokens * g.token_bytes as usize;
        self.at_least(OP, "length of the tokens in bytes", args.tokens.held(), least)?;
        self.aligned(OP, "address of the tokens", &args.tokens)?;
        self.apart("address of the tokens", &args.tokens, least, &self.staging(), g.quantize != 0)?;
        let ids = args.topk_ids.slice().held();
        let id_bytes = args.topk_ids.id_bytes();
        self.at_least(OP, "length of topk_ids in bytes", ids, tokens * top_k * id_bytes)?;
        self.aligned_to(OP, "address of topk_ids", args.topk_ids.slice(), id_bytes)?;
        if let Some(weights) = &args.topk_weights {
            let bytes = weights.held();
            self.at_least(OP, "length of topk_weights in bytes", bytes, tokens * top_k * 4)?;
            self.aligned_to(OP, "address of topk_weights", weights, 4)?;
        }
        if let Some(word) = word {
            self.at_least(OP, "length of the token count in bytes", word.held(), 4)?;
            self.aligned_to(OP, "address of the token count", word, 4)?;
        }
        self.buffer_of(args.handle, "receive buffer", args.rows, g.row_bytes)?;
        let needed = g.scale_bytes > 0;
        match &args.received_scales {
            Some(buffer) => {
                self.buffer_of(args.handle, "buffer of scales", buffer, g.scale_bytes)?;
            }
            None if needed => {
                let limit = "given, since the payload has scales".to_owned();
                return Err(self.argument(OP, "buffer of scales", "missing", limit));
            }
            None => {}
        }
        match &args.scales {
            Some(scales) => {
                let least = tokens * g.scale_bytes as usize;
                self.at_least(OP, "length of the scales in bytes", scales.held(), least)?;
                self.aligned(OP, "address of the scales", scales)?;
                self.apart("address of the scales", scales, least, &self.staged_scales(), false)
            }
            None if needed && g.quantize == 0 => {
                let limit = "given, since the payload has scales".to_owned();
                Err(self.argument(OP, "scales of the tokens", "missing", limit))
            }
            None => Ok(()),
        }
    }

    /// Checks that the receiver's half of a dispatch is given what the sender's was: it reads this rank's own
    /// tokens where that one found them, as many as that one has listed.
    pub(crate) fn check_sent(
        &self,
        args: &Dispatch<'_, '_, B>,
        sent: &Sent,
    ) -> Result<(), DispatchError> {
        const OP: &str = "dispatch_receive";
        let given = args.sent();
        for (argument, given, sent) in [
            ("address of the tokens", given.tokens, sent.tokens),
            ("address of the scales", given.scales, sent.scales),
            ("address of topk_ids", given.topk_ids, sent.topk_ids),
            ("address of topk_weights", given.topk_weights, sent.topk_weights),
            ("address of the number of tokens", given.count_word, sent.count_word),
        ] {
            if given != sent {
                let limit = format!("{sent:#x}, as in dispatch_send");
                return Err(self.argument(OP, argument, format!("{given:#x}"), limit));
            }
        }
        for (argument, given, sent) in [
            ("bytes of an id", given.id_bytes, sent.id_bytes),
            ("number of tokens", given.most, sent.most),
        ] {
            if given != sent {
                return Err(self.argument(
                    OP,
                    argument,
                    given,
                    format!("{sent}, as in dispatch_send"),
                ));
            }
        }
        Ok(())
    }

    /// Checks that what a dispatch copies, the first `bytes` bytes of `from`, does not lie in `area`,
    /// to which it copies them; unless it is there already, and stays as it is.
    fn apart(
        &self,
        argument: &'static str,
        from: &DeviceSlice<'_, B>,
        bytes: usize,
        area: &DeviceSlice<'_, B>,
        changed: bool,
    ) -> Result<(), DispatchError> {
        let end = |slice: &DeviceSlice<'_, B>, bytes: usize| slice.address() + bytes as u64;
        let overlap = from.address() < end(area, area.bytes()) && area.address() < end(from, bytes);
        if !overlap || (from.address() == area.address() && !changed) {
            return Ok(());
        }
        let limit = match changed {
            true => "outside the lane's staging area, to which rows are quantised".to_owned(),
            false => "the start of the lane's staging area, or outside it".to_owned(),
        };
        Err(self.argument("dispatch", argument, format!("{:#x}", from.address()), limit))
    }

    fn buffer_of(
        &self,
        handle: &Handle<B>,
        argument: &'static str,
        buffer: &RowBuffer<B>,
        row_bytes: u32,
    ) -> Result<(), DispatchError> {
        const OP: &str = "dispatch";
        if buffer.row_bytes() != row_bytes as usize {
            let limit = format!("one of {row_bytes} bytes a row");
            let value = format!("one of {} bytes a row", buffer.row_bytes());
            return Err(self.argument(OP, argument, value, limit));
        }
        if buffer.set_id() != handle.rows().id() {
            let limit = "a buffer of the handle's row set".to_owned();
            return Err(self.argument(OP, argument, "one of another row set", limit));
        }
        Ok(())
    }

    /// Checks a slice of rows of sums: one for each of `rows`.
    pub(crate) fn check_rows(
        &self,
        operation: &'static str,
        argument: &'static str,
        slice: &DeviceSlice<'_, B>,
        rows: u32,
    ) -> Result<(), DispatchError> {
        let least = rows as usize * self.dispatcher().inner.geometry.sum_bytes as usize;
        self.at_least(operation, argument, slice.held(), least)?;
        self.aligned(operation, argument, slice)
    }

    /// Checks a slice of rows of sums: one for each of the `rows` rows that a step may use of what
    /// `handle` receives. There may be memory for fewer yet, in the buffers that grow with its capacity.
    pub(crate) fn check_received(
        &self,
        operation: &'static str,
        argument: &'static str,
        slice: &DeviceSlice<'_, B>,
        handle: &Handle<B>,
        rows: u32,
    ) -> Result<(), DispatchError> {
        let row_bytes = self.dispatcher().inner.geometry.sum_bytes as usize;
        self.has_received(operation, argument, slice, handle, (rows, row_bytes))?;
        self.aligned(operation, argument, slice)
    }

    /// The same for so many rows of so many bytes, however they are aligned.
    pub(crate) fn has_received(
        &self,
        operation: &'static str,
        argument: &'static str,
        slice: &DeviceSlice<'_, B>,
        handle: &Handle<B>,
        (rows, row_bytes): (u32, usize),
    ) -> Result<(), DispatchError> {
        if slice.has_rows(handle.rows(), rows, row_bytes) {
            return Ok(());
        }
        let least = rows as usize * row_bytes;
        let limit = format!("at least {least}, or a buffer of the handle's row set");
        Err(self.argument(operation, argument, slice.held(), limit))
    }

    pub(crate) fn at_least(
        &self,
        operation: &'static str,
        argument: &'static str,
        value: usize,
        least: usize,
    ) -> Result<(), DispatchError> {
        if value >= least {
            return Ok(());
        }
        Err(self.argument(operation, argument, value, format!("at least {least}")))
    }

    /// Checks that rows can be moved in units of 16 bytes.
    pub(crate) fn aligned(
        &self,
        operation: &'static str,
        argument: &'static str,
        slice: &DeviceSlice<'_, B>,
    ) -> Result<(), DispatchError> {
        self.aligned_to(operation, argument, slice, 16)
    }

    pub(crate) fn aligned_to(
        &self,
        operation: &'static str,
        argument: &'static str,
        slice: &DeviceSlice<'_, B>,
        bytes: usize,
    ) -> Result<(), DispatchError> {
        if slice.address().is_multiple_of(bytes as u64) {
            return Ok(());
        }
        let value = format!("{:#x}", slice.address());
        Err(self.argument(operation, argument, value, format!("a multiple of {bytes}")))
    }

    pub(crate) fn argument(
        &self,
        operation: &'static str,
        argument: &'static str,
        value: impl fmt::Display,
        limit: String,
    ) -> DispatchError {
        let (rank, value) = (self.dispatcher().rank(), value.to_string());
        DispatchError::Argument { operation, rank, argument, value, limit }
    }
}
