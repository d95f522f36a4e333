"""An exchange: one look-up or prediction from its message to its answer, for every transport and protocol.

The order is always the same: authorise, charge, parse, plan, begin, finish, encode, count. A transport brings the
message and its caller, decides whether the work may be done on the receiving thread (`begin`) or waits for another
thread (`hand_over`, `answer`), and takes the answer. Only a `Message` knows its protocol's encoding.

A small request whose rows are all in memory is answered in `begin`, on the thread that has received it: that is faster
than a handoff to another thread. Such work is bounded, and never waits. If rows must come from disk, a thread of the
look-up pool continues where `begin` stopped, so nothing is done or counted twice. Any other request is handled on the
pool.

    begin ─┬─ short, in memory ─────────────────────── answered
           └─ hand_over ── a thread of the pool ────── answered
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Generator, Sequence
from types import coroutine
from typing import Any, Generic, Protocol, TypeVar

from tierstore.access.roles import NOBODY, Action, Principal
from tierstore.errors import Forbidden, NotFound, TierstoreError
from tierstore.service.context import Service
from tierstore.service.dataplane.inference import AnyRequest, Inference
from tierstore.service.dataplane.plan import Plan, Request, is_short
from tierstore.service.dataplane.tensors import Elements
from tierstore.service.limits.rates import Charge
from tierstore.service.limits.shedding import Caller
from tierstore.service.limits.worker_pool import Done
from tierstore.service.stats import Timings
from tierstore.types import model_and_head

# Limits of work on the receiving thread: a fraction of a millisecond.
DIRECT_BYTES = 64 << 10  # of a message
DIRECT_TEXT_BYTES = 8 << 10  # of elements one by one, either way, and of their description: far slower a byte

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

    def parse(self, *, here: bool) -> bool:
        """Parse the message. False, with nothing done, if it must be little work (`here`) and might not be."""

    @property
    def timeout_us(self) -> int | None: ...
    @property
    def request(self) -> AnyRequest: ...

    def is_long(self) -> bool:
        """Whether reading or writing is surely too much work for the receiving thread, as far as can be seen without
        a view.
        """

    def is_short(self, plan: Plan) -> bool:
        """Whether its work is little, besides rows."""

    def opened(self, inference: Inference) -> None:
        """Called with the open view and the plan."""

    def read(self, inference: Inference) -> tuple[Sequence[Elements], list[Any]]:
        """The elements of the inputs, and arrays for the outputs; their bytes are reserved."""

    def encode(self, plan: Plan, arrays: list[Any]) -> A_co:
        """The answer, from filled arrays; the view is released."""


class Exchange(Generic[A]):
    """A request of `caller` in progress; `route` chooses its version if traffic is split. One thread at a time."""

    __slots__ = (
        "_began_ns",
        "_charged",
        "_charges",
        "_ended",
        "_inference",
        "_parsed",
        "_route",
        "_service",
        "_since_ns",
        "_version",
        "caller",
        "message",
        "spent",
    )  # fmt: skip

    def __init__(self, service: Service, message: Message[A], caller: Caller, route: bytes | str | None = None) -> None:
        self._service, self.message, self.caller, self._route = service, message, caller, route
        self.spent = Timings()
        self._began_ns = self._since_ns = time.perf_counter_ns()
        self._charges: list[Charge] = []
        self._charged: str | None = None  # the model whose rates are charged
        self._parsed = self._ended = False
        self._inference: Inference | None = None
        self._version: int | None = None  # the one that answers, once it is known

    # --- for transports

    def begin(self, *, here: bool = True, failed: BaseException | None = None) -> A | None:
        """Charge the request, and answer it if that is little work without waiting. None: call `hand_over`.

        Not `here`: it is only charged, and all work is for another thread. `failed`: it was begun elsewhere, and fails
        with this error.
        """
        try:
            self._admit()
            if failed is not None:
                raise failed
            if here and self._is_short() and self._start():
                return self._finish()
        except BaseException as error:
            self.fail(error)
            raise
        self._since_ns = time.perf_counter_ns()
        return None

    def hand_over(self, answered: Done) -> None:
        """Have a thread of the look-up pool answer what `begin` did not; it calls `answered`. Event loop only."""

        def ended(answer: A | None, error: BaseException | None) -> None:
            if error is not None:  # also of a call that was not run
                self.fail(error)
            answered(answer, error)

        try:
            self._service.lookup_pool.start(ended, self.answer, caller=self.caller)
        except BaseException as error:
            self.fail(error)
            raise

    @coroutine
    def handed_over(self) -> Generator[Any, Any, A]:
        """The answer of `hand_over`. If no task awaits it, the thread that has the answer goes on with the request."""
        if asyncio.current_task() is None:
            answer: A = yield self.hand_over
            return answer
        loop = asyncio.get_running_loop()
        future: asyncio.Future[A] = loop.create_future()

        def resolve(answer: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(answer)
            else:
                future.set_exception(error)

        def answered(answer: Any, error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody awaits it
                loop.call_soon_threadsafe(resolve, answer, error)

        self.hand_over(answered)
        return (yield from future)

    def answer(self) -> A:
        """Do all work that `begin` has not done, on a thread that may wait. Returns the answer."""
        self._note_queued()
        try:
            if self._inference is None:
                if not self._parsed:
                    self.message.parse(here=False)
                    self._note_parsed()
                self._check_deadline()
                self._open()
                self._start()
            return self._finish()
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
        model = self.message.model
        if model is not None and not isinstance(error, Forbidden):
            self._service.count_failed(model, time.perf_counter_ns() - self._began_ns, error)

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

    def _is_short(self) -> bool:
        """Parse the message and open its view, if all of its work is little. Only then the view stays open."""
        message = self.message
        if not message.parse(here=True):
            return False
        self._note_parsed()
        self._check_deadline()
        if message.is_long() or self._is_surely_long(message.request):
            return False
        plan = self._open().plan
        if is_short(plan) and message.is_short(plan):
            return True
        self._close()  # a view is not held while a request waits for a thread
        return False

    def _is_surely_long(self, request: AnyRequest) -> bool:
        """Whether it has many keys, or a prediction, as far as can be seen without a view. May miss some."""
        if not isinstance(request, Request):
            return False
        plan = request.plan
        if plan is None:  # by default the dense part's outputs are wanted
            return not request.outputs and self._service.dataplane.scores(self._model)
        return not is_short(plan)

    def _note_parsed(self) -> None:
        """Take over what the message itself says: its model, and its timeout."""
        self._parsed = True
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

    def _open(self) -> Inference:
        message = self.message
        route = self._route if message.version is None else None
        inference = self._inference = self._service.dataplane.open(
            self._model, message.version, message.request, route=route
        )
        self._version = inference.version
        for charge in self._charges:
            charge.keys(inference.plan.keys)
        message.opened(inference)
        return inference

    def _start(self) -> bool:
        """Answer from memory as much as possible, without waiting. True if nothing is pending."""
        inference = self._inference
        assert inference is not None
        elements, arrays = self.message.read(inference)
        read_ns = time.perf_counter_ns()
        self.spent.input_ns = read_ns - self._since_ns
        done = inference.begin(elements, arrays)
        self.spent.inference_ns = time.perf_counter_ns() - read_ns
        return done

    def _finish(self) -> A:
        inference = self._inference
        assert inference is not None
        finishing_ns = time.perf_counter_ns()
        inference.finish()
        spent = self.spent
        spent.lookup_ns, spent.dense_ns, spent.disk_ns = inference.lookup_ns, inference.dense_ns, inference.disk_ns
        self._close()
        encoding_ns = time.perf_counter_ns()
        spent.inference_ns += encoding_ns - finishing_ns
        answer = self.message.encode(inference.plan, inference.arrays)
        ended_ns = time.perf_counter_ns()
        spent.output_ns = ended_ns - encoding_ns
        assert self._version is not None
        self._service.inference_stats.succeeded(self._model, self._version, ended_ns - self._began_ns, spent)
        return answer

    def _note_queued(self) -> None:
        now_ns = time.perf_counter_ns()
        self.spent.queued_ns += now_ns - self._since_ns
        self._since_ns = now_ns

    def _close(self) -> None:
        inference, self._inference = self._inference, None
        if inference is not None:
            inference.close()
