"""What the verbs do, as steps: generators that yield the calls to make, and get their replies.

A step is a sequence of calls that go out side by side, or a `Pause`. Whoever carries the steps out (a thread, an event
loop) sends back the replies, or throws the error in which they ended. So what is sent, how it is cut, put together and
tried again stands here once, whatever the transport. Nothing here waits or knows a socket.

Steps of one verb belong to one caller; `ModelFacts` may be used by any thread.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import orjson

from tierstore.client import wire
from tierstore.client.batches import Batch
from tierstore.client.flights import Call, Outgoing
from tierstore.client.replies import Reply, Tensors
from tierstore.client.shards import Cut, Gather
from tierstore.errors import DeadlineExceeded, InvalidInput, NotFound, NotReady, TierstoreError
from tierstore.types import Progress

TRIES = 4  # of a request in shards that meets a switch of versions
POLL_S = (0.05, 1.0)  # how often a job is asked after: at first, and at most
_MOST_MODELS = 256  # whose facts are kept

Version = int | str | None


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait, with nothing under way."""

    seconds: float


Step = Sequence[Call] | Pause
Steps = Generator[Step, Any, Any]


class Until:
    """A verb's deadline. `left` raises DeadlineExceeded once it has passed."""

    def __init__(self, timeout_s: float) -> None:
        if not timeout_s > 0:
            raise InvalidInput(f"timeout_s: expected seconds, more than 0, came {timeout_s!r}")
        self.timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

    def left(self) -> float:
        left = self._at - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"not done within {self.timeout_s:g} s")
        return left


@dataclass(slots=True)
class ModelFacts:
    """What was learnt of the models of a service; bounded. Read and replaced whole, so any thread may."""

    metadata: dict[tuple[str, Version], dict[str, Any]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)  # models whose answers cannot be put together from shards
    dims: dict[tuple[str, Version, str], int] = field(default_factory=dict)  # of features' rows
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def learn_dims(self, model: str, version: Version, rows: Mapping[str, npt.NDArray[Any] | None]) -> None:
        for feature, array in rows.items():
            if array is not None and array.ndim and self.dims.get((model, version, feature)) != array.shape[-1]:
                with self._lock:
                    if len(self.dims) >= 16 * _MOST_MODELS:
                        self.dims.clear()
                    self.dims[model, version, feature] = array.shape[-1]

    def answer_bytes(
        self, model: str, version: Version, batches: Sequence[Batch], dtype: str, found: bool
    ) -> dict[str, int] | None:
        """Bytes of each output of a look-up, if the features' rows have the size that they had; None if never seen."""
        sizes = {}
        for batch in batches:
            dim = self.dims.get((model, version, batch.feature))
            if dim is None:
                return None
            sizes[batch.feature] = batch.rows * dim * (2 if dtype == "float16" else 4)
            if found:
                sizes[f"{batch.feature}.found"] = batch.n
        return sizes

    def learn(self, model: str, version: Version, document: dict[str, Any]) -> None:
        with self._lock:
            if len(self.metadata) >= _MOST_MODELS:
                self.metadata.clear()
            self.metadata[model, version] = document

    def keep_whole(self, model: str) -> None:
        with self._lock:
            if len(self.whole) >= _MOST_MODELS:
                self.whole.clear()
            self.whole.add(model)


# --- documents


def exchange(
    method: str,
    path: str,
    until: Until,
    body: Any = None,
    *,
    content: bytes | None = None,
    kind: str = "application/json",
    repeat: bool | None = None,
) -> Generator[Step, Any, Reply]:
    """One call: `body` as JSON, or `content` as it is. Reads may be repeated, others where `repeat` says so."""
    pieces = [content] if content is not None else [orjson.dumps(body)] if body is not None else []
    outgoing = Outgoing(f"Content-Type: {kind}\r\n" if pieces else "", pieces)
    may = method == "GET" if repeat is None else repeat
    (reply,) = yield [Call(method, path, until.left(), lambda _: outgoing, repeat=may)]
    assert isinstance(reply, Reply)
    return reply


def succeeds(path: str, until: Until) -> Generator[Step, Any, bool]:
    """Whether GET `path` answers 2xx. Raises Unreachable if nothing answers."""
    outgoing = Outgoing("", [])
    (reply,) = yield [Call("GET", path, until.left(), lambda _: outgoing, lambda _: _Status(), repeat=True)]
    return bool(200 <= reply.status < 300)


class _Status(Reply):
    """A reply of which only the status matters."""

    def finish(self) -> None:
        pass


def model_path(model: str, version: Version = None) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return path if version is None else f"{path}/versions/{quote(str(version), safe='')}"


def metadata(facts: ModelFacts, model: str, version: Version, until: Until, *, renew: bool = False) -> Steps:
    """The protocol's metadata of a model, kept from the last time unless `renew`."""
    known = facts.metadata.get((model, version))
    if known is not None and not renew:
        return known
    reply = yield from exchange("GET", model_path(model, version), until)
    document = reply.json()
    if not isinstance(document, dict):
        raise TierstoreError(f"the metadata of model {model!r} is no JSON object: is it a tierstore?")
    facts.learn(model, version, document)
    return document


def job_done(job: str, timeout_s: float, progress: Callable[[Progress], None] | None) -> Steps:
    """Follow a load to its end; its last document."""
    pause_s, longest_s = POLL_S
    told: Progress | None = None
    while True:
        reply = yield from exchange("GET", f"/admin/jobs/{quote(job, safe='')}", Until(timeout_s))
        document = reply.json()
        at = Progress(document.get("phase") or "", document.get("done") or 0, document.get("total") or 0)
        if progress is not None and at != told:
            told = at
            progress(at)
        if document["state"] in ("done", "failed"):
            return document
        yield Pause(pause_s)
        pause_s = min(pause_s * 1.5, longest_s)


# --- inference


@dataclass(frozen=True, slots=True)
class Asked:
    """An inference request: to whom, and how long it may take."""

    model: str
    version: Version
    until: Until
    request_id: str | None = None
    hedge_after_s: float | None = None


Outputs = dict[str, npt.NDArray[Any]]


def infer(asked: Asked, cut: Cut, whole: Callable[[], Cut], facts: ModelFacts) -> Generator[Step, Any, Outputs]:
    """Send a request in its shards, and put their answers together; they are of one version.

    `whole` is the same request uncut, for a model whose answers turn out not to go together.
    """
    request_id = asked.request_id or secrets.token_hex(8)
    version = asked.version
    for _ in range(TRIES):
        gather = Gather(cut)
        calls = [_call(asked, version, request_id, cut, number, gather) for number in range(len(cut.shards))]
        try:
            replies: list[Tensors] = yield calls
        except InvalidInput as error:
            # The protocol answers 400 for a model that does not serve as for a bad request; its own page tells them apart.
            if not (yield from succeeds(f"{model_path(asked.model, asked.version)}/ready", asked.until)):
                raise NotReady(str(error)) from error
            if version == asked.version:
                raise
            version = asked.version  # what it was pinned to is gone
            continue
        except (NotFound, NotReady):
            if version == asked.version:
                raise
            version = asked.version
            continue
        if len(replies) == 1:
            return replies[0].outputs
        if len({reply.version for reply in replies}) > 1:
            # A switch came between them. The version that answered last is the one to ask for, while it is there.
            latest = max(replies, key=lambda reply: reply.order).version
            version = latest if version == asked.version else asked.version
        elif gather.misfit is not None:
            facts.keep_whole(asked.model)
            cut = whole()
        else:
            return gather.arrays
    raise NotReady(
        f"model {asked.model!r} changed its version again and again while a request in {len(cut.shards)} parts "
        "went on; try again"
    )


def _call(asked: Asked, version: Version, request_id: str, cut: Cut, number: int, gather: Gather) -> Call:
    shard = cut.shards[number]
    alone = len(cut.shards) == 1

    def outgoing(left_s: float) -> Outgoing:
        text = wire.document(shard.inputs, shard.outputs, steady(left_s, asked.until.timeout_s))
        fields = (
            f"Content-Type: application/octet-stream\r\n{wire.HEADER_LENGTH}: {len(text)}\r\n"
            f"x-request-id: {request_id}\r\n"
        )
        return Outgoing(fields, [text, *(tensor.data for tensor in shard.inputs if tensor.span is None)])

    def place(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
        return gather.place(number, name, shape, dtype)

    def reply(direct: bool) -> Reply:
        return Tensors(None if alone else place, direct=direct)

    path = f"{model_path(asked.model, version)}/infer"
    return Call("POST", path, asked.until.left(), outgoing, reply, repeat=True, hedge_after_s=asked.hedge_after_s)


def steady(left_s: float, whole_s: float) -> float:
    """What is told of the time left: all of it, or a power of two from above.

    The service keeps what it has planned for requests whose JSON it has seen; a number that is never the same would make
    every request a new one. It only sheds load by it: the deadline itself is kept here.
    """
    if left_s > 0.9 * whole_s:
        return whole_s
    steps = 2.0**-20
    while steps < left_s:
        steps *= 2
    return min(steps, whole_s)


def wanted_outputs(names: Sequence[str] | None) -> list[wire.Output]:
    return [wire.Output(name, {}) for name in names or ()]


def named(outputs: Mapping[str, npt.NDArray[Any]], name: str) -> npt.NDArray[Any]:
    try:
        return outputs[name]
    except KeyError as error:
        raise TierstoreError(f"the service's answer lacks the output {error}") from error
