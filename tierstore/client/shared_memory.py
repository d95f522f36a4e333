"""Large look-ups through memory that is shared with a service on the same host.

The service has to allow it (its metadata lists `system_shared_memory`) and the URL has to name this machine. When
anything fails on this way, the request is sent over HTTP and that answer counts; after a few failures the way is not
used any more. From which size it is faster: docs/decisions/client.md.

The memory is one object of POSIX shared memory, cut into slots. A slot is leased to one request and its answer. It
is free again when the last array that lies in it is gone, so nothing overwrites an array that a caller still holds. A
slot that the service may still write to (its request was abandoned) is never used again. The object's name is random
and removed once the service has opened it, so a crash leaves nothing behind.

Any thread may use these classes; the operations belong to the verb that runs them. A slot is freed on the thread that
drops its last array.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tierstore.client import wire
from tierstore.client.attempts import Call, Outgoing
from tierstore.client.inference import (
    Deadline,
    InferenceRequest,
    Operation,
    Outputs,
    exchange,
    model_path,
    timeout_line,
)
from tierstore.client.settings import Address
from tierstore.errors import DeadlineExceeded, InvalidInput, NotFound, Overloaded, TierstoreError, Unreachable

AUTO_BYTES = 1 << 19  # of inputs and outputs together, from which this is the faster way
FAILURE_LIMIT = 3
SLOTS = 4
SLOT_BYTES = 8 << 20
ALIGNMENT = 64
_UNREGISTER_S = 1.0
_DIRECTORY = Path("/dev/shm")

Choice = Literal["auto"] | bool


class SharedMemory:
    """The shared memory of one client, created by the first request that can use it."""

    def __init__(self, address: Address, choice: Choice) -> None:
        if choice not in ("auto", True, False):
            raise InvalidInput(f"shared_memory: expected 'auto', True or False, got {choice!r}")
        self._least_bytes = AUTO_BYTES if choice == "auto" else 0
        self._lock = threading.Lock()
        # guarded by _lock
        self._usable = bool(choice) and address.loopback
        self._region: Region | None = None
        self._creating = False
        self._failures = 0  # in a row
        self.answers = 0

    def stats(self) -> dict[str, int]:
        """Whether it is `usable`, slots that are `free`, and the requests answered this way (`answers`)."""
        region = self._region
        return {"usable": self._usable, "free": 0 if region is None else region.free, "answers": self.answers}

    def inference(
        self,
        request: InferenceRequest,
        inputs: Sequence[wire.Input],
        outputs: Sequence[wire.Output],
        nbytes: Mapping[str, int],
    ) -> Operation[Outputs | None]:
        """Send a request whose tensors all lie in shared memory. None where it has to go over HTTP.

        nbytes: the expected size of each output.
        """
        sizes = [*nbytes.values(), *(tensor.data.nbytes for tensor in inputs)]
        total = sum(sizes) if all(sizes) else -1  # an empty tensor has no place
        if not self._usable or request.hedge_after_s is not None or not self._least_bytes <= total <= SLOT_BYTES:
            return None
        region = self._region
        if region is None or region.worn or region.inherited:
            region = yield from self._replace(region, request.deadline)
        lease = None if region is None else region.lease()
        if region is None or lease is None:
            return None
        output_spaces = [(output, lease.reserve(nbytes[output.name])) for output in outputs]
        input_spaces = [(tensor, lease.reserve(tensor.data.nbytes)) for tensor in inputs]
        if any(space is None for _, space in (*output_spaces, *input_spaces)):
            return None
        finished = False
        try:
            (reply,) = yield [_call(request, input_spaces, output_spaces)]
            finished = True
            made = _arrays(reply.body, {output.name: space[1] for output, space in output_spaces if space is not None})
        except DeadlineExceeded:
            raise
        except Unreachable:
            return None
        except TierstoreError as error:
            finished = True  # the service answered, so it writes to the slot no more
            if not isinstance(error, Overloaded):
                yield from self._failed(region, unregistered=isinstance(error, NotFound))
            return None
        finally:
            if not finished:
                lease.abandon()
        with self._lock:
            self._failures = 0
            self.answers += 1
        return made

    def close(self) -> Operation[None]:
        """Unregister the region at the service. Arrays that lie in it stay valid."""
        with self._lock:
            self._usable = False
            region = self._region
        yield from self._drop(region)

    def _replace(self, region: Region | None, deadline: Deadline) -> Operation[Region | None]:
        """A new region in place of one that cannot be used any more. None if there can be none now."""
        if region is not None:
            yield from self._drop(region, min(_UNREGISTER_S, deadline.remaining()))
        return (yield from self._create(deadline))

    def _drop(self, region: Region | None, timeout_s: float = _UNREGISTER_S) -> Operation[None]:
        with self._lock:
            if region is not self._region:
                return
            self._region = None
        if region is not None and not region.inherited:  # the parent process still uses an inherited one
            path = f"/v2/systemsharedmemory/region/{region.name}/unregister"
            try:
                yield from exchange("POST", path, Deadline(timeout_s), {})
            except TierstoreError:
                return  # it is gone already, or the service drops it when it stops

    def _create(self, deadline: Deadline) -> Operation[Region | None]:
        with self._lock:
            if self._creating:
                return None  # by another thread; this request goes over HTTP
            self._creating = True
        region = None
        try:
            server = yield from exchange("GET", "/v2", deadline)
            if "system_shared_memory" not in server.json().get("extensions", []):
                self._usable = False
                return None
            region = Region()
            body = {"key": f"/{region.name}", "offset": 0, "byte_size": region.nbytes}
            yield from exchange("POST", f"/v2/systemsharedmemory/region/{region.name}/register", deadline, body)
            self._region = region
        except DeadlineExceeded:
            raise
        except (TierstoreError, OSError, AttributeError):
            yield from self._failed(None, unregistered=False)  # a loopback port that leads to another host, say
            return None
        finally:
            self._creating = False
            if region is not None:
                region.unlink()
        return region

    def _failed(self, region: Region | None, *, unregistered: bool) -> Operation[None]:
        """Count a failure. The reason may be another one, so this way is given up only after a few in a row.

        unregistered: the service may not have the region any more (it was restarted); the next request registers another.
        """
        with self._lock:
            if region is not None and region is not self._region:
                return  # it was replaced meanwhile
            self._failures += 1
            off = self._failures >= FAILURE_LIMIT
            if off:
                self._usable = False
        if off or unregistered:
            yield from self._drop(region)


class Region:
    """One object of shared memory. All of it is reserved when it is created: OSError where there is no room.

    `lost`: slots that are never leased again. After a fork the child leases none of its parent's.
    """

    def __init__(self) -> None:
        # constant after construction
        self.name = f"ts-client-{secrets.token_hex(8)}"  # of the object, and of the region at the service
        self.nbytes = SLOTS * SLOT_BYTES
        self._path = _DIRECTORY / self.name
        self._process = os.getpid()
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self.nbytes)
            self._memory = mmap.mmap(descriptor, self.nbytes)
        except BaseException:
            self.unlink()
            raise
        finally:
            os.close(descriptor)
        self.lost = 0  # two threads that lose a slot at the same time may count one
        self._free = deque(range(SLOTS))  # append and pop are atomic: the garbage collector may free a slot at any time

    @property
    def free(self) -> int:
        """Slots that are not leased."""
        return len(self._free)

    @property
    def inherited(self) -> bool:
        """Whether it belongs to the process that this one was forked from."""
        return self._process != os.getpid()

    @property
    def worn(self) -> bool:
        """Whether half of the slots are lost, so that it should be replaced."""
        return 2 * self.lost >= SLOTS

    def unlink(self) -> None:
        """Remove the name. Processes that have the object open go on using it."""
        self._path.unlink(missing_ok=True)

    def lease(self) -> Lease | None:
        """A slot; None if all are in use."""
        if self.inherited:
            return None
        try:
            slot = self._free.popleft()
        except IndexError:
            return None
        space: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8, SLOT_BYTES, slot * SLOT_BYTES)
        return Lease(self, slot * SLOT_BYTES, space, weakref.finalize(space, self._free.append, slot))


class Lease:
    """One slot, for one request. The slot is free again once the lease and all arrays in the slot are gone."""

    def __init__(self, region: Region, begin: int, space: npt.NDArray[np.uint8], finalizer: Any) -> None:
        self._region, self._begin, self._space, self._finalizer = region, begin, space, finalizer
        finalizer.atexit = False
        self._used = 0

    def reserve(self, nbytes: int) -> tuple[dict[str, Any], npt.NDArray[np.uint8]] | None:
        """The next `nbytes` of the slot: the protocol's parameters that name them, and the bytes. None if it is full."""
        begin = self._used
        if begin + nbytes > SLOT_BYTES:
            return None
        self._used = begin + (-(-nbytes // ALIGNMENT) * ALIGNMENT)
        region = {
            "shared_memory_region": self._region.name,
            "shared_memory_offset": self._begin + begin,
            "shared_memory_byte_size": nbytes,
        }
        return region, self._space[begin : begin + nbytes]

    def abandon(self) -> None:
        """Never lease this slot again: the service may write to it at any time."""
        if self._finalizer.detach() is not None:
            self._region.lost += 1


def _call(request: InferenceRequest, input_spaces: Sequence[Any], output_spaces: Sequence[Any]) -> Call:
    inputs = []
    for tensor, (region, space) in input_spaces:
        space[:] = np.frombuffer(tensor.data, np.uint8)
        inputs.append(wire.Input(tensor.name, tensor.datatype, tensor.shape, tensor.data, region))
    outputs = [
        wire.Output(output.name, {"binary_data": False, **output.parameters, **region})
        for output, (region, _) in output_spaces
    ]

    text = wire.document(inputs, outputs)

    def outgoing(remaining_s: float) -> Outgoing:
        return Outgoing(f"Content-Type: application/json\r\n{timeout_line(remaining_s)}", [text])

    # Not repeated: a late first copy would write where the answer of the second lies.
    path, timeout_s = f"{model_path(request.model, request.version)}/infer", request.deadline.remaining()
    return Call("POST", path, timeout_s, outgoing, request_id=request.request_id)


def _arrays(text: bytes | bytearray, spaces: Mapping[str, npt.NDArray[np.uint8]]) -> Outputs:
    """The outputs that an answer describes, which lie in `spaces`."""
    outputs = {}
    for output in wire.described(text)[1]:
        space = spaces.get(output.name)
        if space is None or output.dtype is wire.OBJECT:
            raise wire.not_of_the_protocol(f"output {output.name!r} was not requested in shared memory")
        nbytes = math.prod(output.shape) * output.dtype.itemsize
        if nbytes > len(space):
            raise wire.not_of_the_protocol(f"output {output.name!r} has {nbytes} bytes, expected at most {len(space)}")
        outputs[output.name] = space[:nbytes].view(output.dtype).reshape(output.shape)
    return outputs
