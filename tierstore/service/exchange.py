"""An exchange: one look-up or prediction from its message to its answer, for every transport and protocol.

The order is always the same: authorise, charge, parse, plan, look up, encode, count. A transport brings the message and
its caller. `admit` does the first two steps on the thread that has received the message, so that who may not ask, or
asks too often, waits for no thread and takes nobody's place. `answer` does the others on a thread of the look-up pool.
Only a `Message` knows its protocol's encoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from tierstore.access.roles import NOBODY, Action, Principal
from tierstore.errors import Forbidden, NotFound, TierstoreError
from tierstore.service.context import Service
from tierstore.service.dataplane.inference import AnyRequest, Inference
from tierstore.service.dataplane.plan import Plan
from tierstore.service.dataplane.tensors import Elements
from tierstore.service.limits.rates import Charge
from tierstore.service.limits.shedding import Caller
from tierstore.service.stats import Timings
from tierstore.types import model_and_head

A = TypeVar("A")  # an answer
A_co = TypeVar("A_co", covariant=True)


class Message(Protocol[A_co]):
    """A request as its protocol reads it, and the answer as it writes it. One thread at a time.

    `model` is the one that it seems to concern, or None, until it is parsed. The fields after `parse` are valid once
    it was parsed.
    """

    @property
    def nbytes(self) -> int: ...
    @property
    def model(self) -> str | None: ...
    @property
    def version(self) -> int | str | None: ...

    def parse(self) -> None: ...

    @property
    def timeout_us(self) -> int | None: ...
    @property
    def request(self) -> AnyRequest: ...

    def opened(self, inference: Inference) -> None:
        """Called with the open view and the plan."""

    def read(self, inference: Inference) -> tuple[Sequence[Elements], list[Any]]:
        """The elements of the inputs, and arrays for the outputs; their bytes are reserved."""

    def encode(self, plan: Plan, arrays: list[Any]) -> A_co:
        """The answer, from filled arrays; the view is released."""


class Exchange(Generic[A]):
    """A request of `caller` in progress; `route` chooses its version if traffic is split. One thread at a time.

    `model_of_failed` finds the model of a message that fails before it was parsed.
    """

    __slots__ = (
        "_began_ns",
        "_charged",
        "_charges",
        "_ended",
        "_inference",
        "_model_of_failed",
        "_route",
        "_service",
        "_since_ns",
        "_version",
        "caller",
        "message",
        "spent",
    )  # fmt: skip

    def __init__(
        self,
        service: Service,
        message: Message[A],
        caller: Caller,
        route: bytes | str | None = None,
        model_of_failed: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._service, self.message, self.caller, self._route = service, message, caller, route
        self._model_of_failed = model_of_failed
        self.spent = Timings()
        self._began_ns = self._since_ns = time.perf_counter_ns()
        self._charges: list[Charge] = []
        self._charged: str | None = None  # the model whose rates are charged
        self._ended = False
        self._inference: Inference | None = None
        self._version: int | None = None  # the one that answers, once it is known

    # --- for transports

    def admit(self, failed: BaseException | None = None) -> None:
        """Authorise and charge the request, unless its deadline has passed. `failed`: it was begun elsewhere, and fails
        with this error.
        """
        self._began_ns = time.perf_counter_ns()  # its body is there
        try:
            self._admit()
            if failed is not None:
                raise failed
            self._check_deadline()
        except BaseException as error:
            self.fail(error)
            raise
        self._since_ns = time.perf_counter_ns()

    def answer(self) -> A:
        """Answer an admitted request, on a thread that may wait."""
        began_ns = time.perf_counter_ns()
        self.spent.queued_ns, self._since_ns = began_ns - self._since_ns, began_ns
        try:
            self.message.parse()
            self._note_parsed()
            self._check_deadline()
            self._open()
            self._look_up()
            return self._encode()
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Release the view, and count the failure for the version that was chosen. Only the first call does
        anything.
        """
        ended, self._ended = self._ended, True
        self._close()
        if ended or not isinstance(error, TierstoreError):
            return
        if error.version is None:
            error.version = self._version
        model = None if isinstance(error, Forbidden) else self.message.model or self._late_model()
        if model is not None:
            self._service.count_failed(model, time.perf_counter_ns() - self._began_ns, error)

    def _late_model(self) -> str | None:
        """The model of a message that was not parsed, if its caller may read it."""
        model = self._model_of_failed()
        return model if model is not None and self.caller.principal.may(Action.READ, model) else None

    # --- the steps

    @property
    def _model(self) -> str:
        model = self.message.model
        assert model is not None
        return model

    def _admit(self) -> None:
        """Authorise and charge before any work, so that malformed messages cost something too.

        A message whose model is not known yet, or does not exist, is charged to its caller alone.
        """
        model = self.message.model
        if model is not None:
            self._authorise(model)
            try:
                self._service.dataplane.model(model)
            except NotFound:
                model = None  # refused when its view is opened
        self._charge(self.caller.principal, model)

    def _authorise(self, model: str) -> None:
        self.caller.principal.check(Action.READ, model)

    def _charge(self, principal: Principal, model: str | None) -> None:
        self._charged = model
        of = None if model is None else model_and_head(model)[0]
        charge = self._service.rates.admit(principal, of, self.message.nbytes)
        if charge is not None:
            self._charges.append(charge)

    def _note_parsed(self) -> None:
        """Take over what the message itself says: its model, and its timeout."""
        model = self._model
        if model != self._charged:
            self._authorise(model)
            self._service.dataplane.model(model)
            self._charge(NOBODY, model)
        timeout_us = self.message.timeout_us
        if timeout_us is not None:
            self.caller.within(timeout_us * 1000)

    def _check_deadline(self) -> None:
        """Raise if the caller's deadline has passed. Called before work is started."""
        if self.caller.deadline_ns is not None:
            self._service.shed.check(self.caller)

    def _open(self) -> None:
        message = self.message
        route = self._route if message.version is None else None
        inference = self._inference = self._service.dataplane.open(
            self._model, message.version, message.request, route=route
        )
        self._version = inference.version
        for charge in self._charges:
            charge.keys(inference.plan.keys)
        message.opened(inference)

    def _look_up(self) -> None:
        inference, spent = self._inference, self.spent
        assert inference is not None
        elements, arrays = self.message.read(inference)
        read_ns = time.perf_counter_ns()
        spent.input_ns = read_ns - self._since_ns
        inference.run(elements, arrays)
        self._since_ns = time.perf_counter_ns()
        spent.inference_ns = self._since_ns - read_ns
        spent.lookup_ns, spent.dense_ns, spent.disk_ns = inference.lookup_ns, inference.dense_ns, inference.disk_ns

    def _encode(self) -> A:
        inference = self._inference
        assert inference is not None
        self._close()
        answer = self.message.encode(inference.plan, inference.arrays)
        ended_ns = time.perf_counter_ns()
        self.spent.output_ns = ended_ns - self._since_ns
        assert self._version is not None
        self._service.inference_stats.succeeded(self._model, self._version, ended_ns - self._began_ns, self.spent)
        return answer

    def _close(self) -> None:
        inference, self._inference = self._inference, None
        if inference is not None:
            inference.close()
