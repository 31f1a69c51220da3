//! Loops of a recording: the body of the innermost records, on a stream of its own.

use super::position::position;
use super::{MAX_DEPTH, Recorder};
use crate::backend::{BackendError, Condition};
use crate::cuda::conditional::{self, OpenBody};
use crate::cuda::driver::{Driver, DriverError, ask_handle};
use crate::cuda::graveyard::Grave;
use crate::cuda::remains::Remains;
use crate::cuda::stream::BodyStream;
use crate::recording::{LoopCondition, ScopeId, condition_of, ending, refused};

impl Recorder {
    /// Creates the condition of a loop that will stand in `body`.
    pub(in crate::cuda) fn condition(
        &mut self,
        driver: &Driver,
        body: Option<ScopeId>,
    ) -> Result<Condition, BackendError> {
        const NAME: &str = "condition";
        let stream = self.target(body, NAME)?;
        self.check_capture(driver, stream, NAME)?;
        let position = position(driver, stream)?;
        let handle = conditional::create_condition(driver, position.graph, self.device.context)?;
        self.conditions.push(LoopCondition { handle, scope: body, used: false });
        Ok(Condition(handle))
    }

    /// Appends a loop to what `body` records, and opens its own body.
    pub(in crate::cuda) fn begin_while(
        &mut self,
        driver: &Driver,
        body: Option<ScopeId>,
        condition: Condition,
    ) -> Result<BodyStream, BackendError> {
        const NAME: &str = "begin_while";
        let stream = self.target(body, NAME)?;
        self.check_capture(driver, stream, NAME)?;
        let known = condition_of(&mut self.conditions, |known| *known == condition.0, body)?;
        let at = position(driver, stream)?;
        if self.bodies.len() == MAX_DEPTH {
            return Err(refused(NAME, &format!("loops nest at most {MAX_DEPTH} deep")));
        }
        let inner = match self.device.take_body_stream() {
            Some(stream) => stream,
            None => self.device.create_stream()?,
        };
        known.used = true;
        match conditional::open(driver, self.device.context, stream, &at, inner, condition.0) {
            Ok(graph) => {
                let id = ScopeId::fresh();
                self.bodies.push(OpenBody { id, stream: inner, graph });
                Ok(BodyStream { id, handle: inner })
            }
            Err(error) => {
                self.device.return_body_stream(inner);
                self.broken = Some(format!("a loop could not be begun: {}", error.text()));
                Err(error.into())
            }
        }
    }

    /// Closes `body`. On an error the body stays open, or nothing more can be recorded.
    pub(in crate::cuda) fn end_while(
        &mut self,
        driver: &Driver,
        outer: Option<ScopeId>,
        body: Option<ScopeId>,
    ) -> Result<(), BackendError> {
        const NAME: &str = "end_while";
        if let Some(reason) = &self.broken {
            return Err(refused(NAME, reason));
        }
        let open = ending(&self.bodies, outer, body)?;
        self.check_capture(driver, open.stream, NAME)?;
        if position(driver, open.stream)?.count == 0 {
            return Err(refused(NAME, "the body is empty, so nothing in it could end the loop"));
        }
        let graph = open.graph;
        if let Err(error) = self.end_innermost(driver) {
            self.broken = Some(format!("the body of a loop could not be ended: {}", error.text()));
            return Err(error.into());
        }
        if let Some(kind) = conditional::forbidden_in_body(driver, graph)? {
            let reason = format!("the body of a loop holds {kind}, which the driver refuses there");
            self.broken = Some(reason.clone());
            return Err(refused(NAME, &reason));
        }
        self.ended.push(graph);
        Ok(())
    }

    /// Ends what the innermost body records.
    pub(super) fn end_innermost(&mut self, driver: &Driver) -> Result<(), DriverError> {
        let Some(open) = self.bodies.pop() else { return Ok(()) };
        let ended =
            // SAFETY: the stream records, and this is the thread that made it.
            ask_handle(|graph| unsafe { driver.cuStreamEndCapture(open.stream.0, graph) });
        match ended {
            Ok(_) => self.device.return_body_stream(open.stream),
            // It may be left in whatever state; it is not used again.
            Err(_) => {
                self.device.graveyard.bury(Grave::Stream(Box::new(Remains::of_idle(open.stream))));
            }
        }
        ended.map(drop)
    }
}
