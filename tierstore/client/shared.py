"""Large look-ups through memory shared with a service on the same host, where both sides can; else nothing changes.

The service has to allow it (its metadata lists `system_shared_memory`) and the URL to name this machine. Whatever goes
wrong on this way, the request is sent over HTTP as if it had never been tried, and that answer counts. After a few
failures it is not tried again. Which way pays from which size: docs/decisions/client.md.

Any thread may use one `Shared`; the steps it gives belong to the verb that asked.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tierstore.client import steps, wire
from tierstore.client.address import Address
from tierstore.client.flights import Call, Outgoing
from tierstore.client.ring import SLOT_BYTES, Ring
from tierstore.client.steps import Asked, Outputs, Step, Until
from tierstore.errors import DeadlineExceeded, InvalidInput, NotFound, Overloaded, TierstoreError, Unreachable

AUTO_BYTES = 1 << 19  # of an answer, from which it is the faster way
MOST_STRIKES = 3
_UNREGISTER_S = 1.0

Choice = Literal["auto"] | bool


class Shared:
    """The ring of one client, made at the first request that wants it."""

    def __init__(self, address: Address, choice: Choice) -> None:
        if choice not in ("auto", True, False):
            raise InvalidInput(f"shared_memory: expected 'auto', True or False, came {choice!r}")
        self._least = AUTO_BYTES if choice == "auto" else 0
        self._lock = threading.Lock()
        self._usable = bool(choice) and address.loopback  # guarded by _lock, as what follows
        self._ring: Ring | None = None
        self._making = False
        self._strikes = 0
        self.answers = 0

    def figures(self) -> dict[str, Any]:
        """Slots that are free, and requests answered this way."""
        ring = self._ring
        return {"usable": self._usable, "free": 0 if ring is None else ring.free, "answers": self.answers}

    def infer(
        self, asked: Asked, inputs: Sequence[wire.Input], outputs: Sequence[wire.Output], nbytes: Mapping[str, int]
    ) -> Generator[Step, Any, Outputs | None]:
        """The request whole, its tensors in shared memory; None where it has to go over HTTP.

        nbytes: that each output will take, as far as is known.
        """
        sizes = [*nbytes.values(), *(tensor.data.nbytes for tensor in inputs)]
        total = sum(sizes) if all(sizes) else -1  # no place is empty
        if not self._usable or asked.hedge_after_s is not None or not self._least <= total <= SLOT_BYTES:
            return None
        ring = self._ring
        if ring is not None and (ring.worn or ring.inherited):
            yield from self._forget(ring, min(_UNREGISTER_S, asked.until.left()))
            ring = None
        ring = ring or (yield from self._make(asked.until))
        lease = None if ring is None else ring.lease()
        if ring is None or lease is None:
            return None
        spans = [(output, lease.take(nbytes[output.name])) for output in outputs]
        places = [(tensor, lease.take(tensor.data.nbytes)) for tensor in inputs]
        if any(taken is None for _, taken in (*spans, *places)):
            return None
        finished = False
        try:
            (reply,) = yield [self._call(asked, places, spans)]
            finished = True
            made = _arrays(reply.body, {output.name: taken[1] for output, taken in spans if taken is not None})
        except (DeadlineExceeded, Unreachable) as error:
            if isinstance(error, DeadlineExceeded):
                raise
            return None
        except TierstoreError as error:
            finished = True  # the service answered, if by a refusal, so it is done with the slot
            if isinstance(error, Overloaded):
                return None
            yield from self._strike(ring, lost=isinstance(error, NotFound))
            return None
        finally:
            if not finished:
                lease.lose()
        with self._lock:
            self._strikes = 0
            self.answers += 1
        return made

    def close(self) -> Generator[Step, Any, None]:
        """Tell the service to forget the region. Arrays that lie in it stay good."""
        with self._lock:
            self._usable = False
            ring = self._ring
        yield from self._forget(ring)

    def _forget(self, ring: Ring | None, timeout_s: float = _UNREGISTER_S) -> Generator[Step, Any, None]:
        with self._lock:
            if ring is not self._ring:
                return
            self._ring = None
        if ring is not None and not ring.inherited:  # a parent's is in use there
            try:
                yield from steps.exchange("POST", f"/v2/systemsharedmemory/region/{ring.name}/unregister", Until(timeout_s), {})  # fmt: skip
            except TierstoreError:
                return  # it is gone, or will be with the service

    def _call(self, asked: Asked, places: Sequence[Any], spans: Sequence[Any]) -> Call:
        given = []
        for tensor, (span, space) in places:
            space[:] = np.frombuffer(tensor.data, np.uint8)
            given.append(wire.Input(tensor.name, tensor.datatype, tensor.shape, tensor.data, span))
        wanted = [wire.Output(output.name, {"binary_data": False, **output.parameters, **span}) for output, (span, _) in spans]  # fmt: skip

        def outgoing(left_s: float) -> Outgoing:
            text = wire.document(given, wanted, steps.steady(left_s, asked.until.timeout_s))
            fields = "Content-Type: application/json\r\n"
            if asked.request_id is not None:
                fields += f"x-request-id: {asked.request_id}\r\n"
            return Outgoing(fields, [text])

        # Not repeated: a first copy that is late would write where the answer of the second lies.
        path = f"{steps.model_path(asked.model, asked.version)}/infer"
        return Call("POST", path, asked.until.left(), outgoing)

    def _make(self, until: Until) -> Generator[Step, Any, Ring | None]:
        with self._lock:
            if self._making:
                return None  # another thread is at it; this request does without
            self._making = True
        ring = None
        try:
            served = yield from steps.exchange("GET", "/v2", until)
            if "system_shared_memory" not in served.json().get("extensions", []):
                self._usable = False
                return None
            ring = Ring()
            body = {"key": f"/{ring.name}", "offset": 0, "byte_size": ring.nbytes}
            yield from steps.exchange("POST", f"/v2/systemsharedmemory/region/{ring.name}/register", until, body)
            self._ring = ring
        except DeadlineExceeded:
            raise
        except (TierstoreError, OSError, AttributeError):
            yield from self._strike(None, lost=False)  # another host behind a loopback port, say
            return None
        finally:
            self._making = False
            if ring is not None:
                ring.unlink()
        return ring

    def _strike(self, ring: Ring | None, *, lost: bool) -> Generator[Step, Any, None]:
        """It did not work, maybe for reasons that have nothing to do with it; try again, but not for ever.

        lost: the service may not know the region any more (it was restarted); the next request registers another.
        """
        with self._lock:
            if ring is not None and ring is not self._ring:
                return  # another has taken its place meanwhile
            self._strikes += 1
            off = self._strikes >= MOST_STRIKES
            if off:
                self._usable = False
        if off or lost:
            yield from self._forget(ring)


def _arrays(text: bytes | bytearray, spaces: Mapping[str, npt.NDArray[np.uint8]]) -> Outputs:
    """The outputs that an answer says lie in these places."""
    outputs = {}
    for output in wire.described(text)[1]:
        space = spaces.get(output.name)
        if space is None or output.dtype is wire.OBJECT:
            raise wire.not_of_the_protocol(f"output {output.name!r} is in no place that was given")
        nbytes = math.prod(output.shape) * output.dtype.itemsize
        if nbytes > len(space):
            raise wire.not_of_the_protocol(f"output {output.name!r} does not fit its place")
        outputs[output.name] = space[:nbytes].view(output.dtype).reshape(output.shape)
    return outputs
