"""Operations, the unit that transports carry out, and the one behind look-ups and `predict`: the inference request.

An operation is a generator. It yields steps, each a sequence of calls that go out side by side, or a `Pause`. The
transport carries a step out and sends back the replies, or throws the error that ended it. So what is sent, how it is
split and joined, and when it is tried again stands here once for both transports; nothing here waits or knows a socket.

An operation belongs to one caller; any thread may use a `ModelCache`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from tierstore.arguments import as_version, check_seconds, names_of
from tierstore.client import wire
from tierstore.client.attempts import NodeCall, Outgoing, new_request_id
from tierstore.client.replies import DocumentReply, Tensors, checked, part_of
from tierstore.client.splitting import JoinedOutputs, Split
from tierstore.errors import DeadlineExceeded, MissingExtra, NotFound, NotReady, TierstoreError, shown
from tierstore.forks import renew_in_child
from tierstore.types import NAME, model_and_head

SWITCH_ATTEMPTS = 4  # at a request in parts, when versions switch between the parts
_MODELS_LIMIT = 256  # in the cache

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Outputs = dict[str, npt.NDArray[Any]]
else:
    Outputs = dict

Version = int | str | None
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait, with no call under way."""

    seconds: float


Step = Sequence[NodeCall] | Pause
Operation = Generator[Step, Any, T]


class Deadline:
    """When a verb has to be done."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = check_seconds("timeout_s", timeout_s)
        self._at = time.monotonic() + self.timeout_s

    def remaining(self) -> float:
        """Seconds that remain. Raises DeadlineExceeded when none do."""
        remaining_s = self._at - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded(f"not done within {self.timeout_s:g} s")
        return remaining_s


@dataclass(slots=True, eq=False, weakref_slot=True)
class ModelCache:
    """What earlier answers showed of the service's models; bounded.

    Entries are replaced whole, so any thread may read.
    """

    metadata: dict[tuple[str, Version], dict[str, Any]] = field(default_factory=dict)
    unsplittable: set[str] = field(default_factory=set)  # models whose answers cannot be joined from parts
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        renew_in_child(self)

    def renew(self) -> None:
        self._lock = threading.Lock()

    def add_metadata(self, model: str, version: Version, document: dict[str, Any]) -> None:
        with self._lock:
            if len(self.metadata) >= _MODELS_LIMIT:
                self.metadata.clear()
            self.metadata[model, version] = document

    def add_unsplittable(self, model: str) -> None:
        with self._lock:
            if len(self.unsplittable) >= _MODELS_LIMIT:
                self.unsplittable.clear()
            self.unsplittable.add(model)


# --- documents


def exchange(
    method: str,
    path: str,
    deadline: Deadline,
    body: Any = None,
    *,
    content: bytes | None = None,
    content_type: str = "application/json",
    repeat: bool | None = None,
    request_id: str | None = None,
) -> Operation[DocumentReply]:
    """One call: `body` as JSON, or `content` as it is. Reads may be repeated, others where `repeat` says so."""
    request_id = request_id or new_request_id()
    pieces = [content] if content is not None else [wire.as_json(body)] if body is not None else []
    outgoing = Outgoing(f"Content-Type: {content_type}\r\n" if pieces else "", pieces)
    may_repeat = method == "GET" if repeat is None else repeat
    (reply,) = yield [
        NodeCall(method, path, deadline.remaining(), lambda _: outgoing, repeat=may_repeat, request_id=request_id)
    ]
    assert isinstance(reply, DocumentReply)
    return reply


def text(path: str, deadline: Deadline) -> Operation[str]:
    """What GET `path` answers, as text."""
    reply = yield from exchange("GET", path, deadline)
    return bytes(reply.body).decode()


def succeeds(path: str, deadline: Deadline) -> Operation[bool]:
    """Whether GET `path` answers 2xx. Raises Unreachable if nothing answers."""
    outgoing = Outgoing("", [])
    (reply,) = yield [NodeCall("GET", path, deadline.remaining(), lambda _: outgoing, lambda _: _Status(), repeat=True)]
    return bool(200 <= reply.status < 300)


class _Status(DocumentReply):
    """A reply of which only the status matters."""

    def finish(self) -> None:
        pass


def model_path(model: str, version: Version = None) -> str:
    """The path of a model, or a head, or of a version of it. NotFound for a name that none can have."""
    base, head = model_and_head(model) if isinstance(model, str) else (model, "")
    path = f"/v2/models/{known_name('model', base)}" + (f".{known_name('head', head)}" if head else "")
    return path if version is None else f"{path}/versions/{version}"


def known_name(kind: str, name: object) -> str:
    """`name`, which a model, a head, a feature, a table or a label may have. NotFound for one that none can have."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise NotFound(f"no {kind} {shown(name)}: a name is 1 to 64 of A-Z a-z 0-9 _ -, a letter or digit first")
    return name


def metadata(
    cache: ModelCache,
    model: str,
    version: Version,
    deadline: Deadline,
    *,
    renew: bool = False,
    request_id: str | None = None,
) -> Operation[dict[str, Any]]:
    """The protocol's metadata of a model, from the cache unless `renew`."""
    version = as_version(version)
    path = model_path(model, version)
    cached = cache.metadata.get((model, version))
    if cached is not None and not renew:
        return cached
    reply = yield from exchange("GET", path, deadline, request_id=request_id)
    document = reply.object()
    checked(document.get("parameters") or {}, dict, "an object of parameters")
    for part in ("inputs", "outputs"):
        for tensor in checked(document.get(part, []), list, f"a list of {part}"):
            part_of(tensor, "name", str)
    cache.add_metadata(model, version, document)
    return document


# --- inference


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """The model of an inference request, and how it is sent."""

    model: str
    version: Version
    deadline: Deadline
    request_id: str
    hedge_after_s: float | None = None


def inference(
    request: InferenceRequest, split: Split, whole: Callable[[], Split], cache: ModelCache
) -> Operation[Outputs]:
    """Send a request in its parts and join their answers, which are of one version.

    `whole` gives the same request in one part, for a model whose answers turn out not to join.
    """
    request_id = request.request_id
    version = request.version
    for _ in range(SWITCH_ATTEMPTS):
        joined = JoinedOutputs(split)
        calls = [_call(request, version, request_id, split, number, joined) for number in range(len(split.parts))]
        try:
            replies: list[Tensors] = yield calls
        except (NotFound, NotReady):
            if version == request.version:
                raise
            version = request.version  # the version that it was pinned to is gone
            continue
        if len(replies) == 1:
            return replies[0].outputs
        if len({reply.version for reply in replies}) > 1:
            # Versions were switched between the parts. Pin the one that answered last, while it is served.
            latest = max(replies, key=lambda reply: reply.order).version
            version = latest if version == request.version else request.version
        elif joined.misfit is not None:
            cache.add_unsplittable(request.model)
            split = whole()
        else:
            return joined.arrays
    raise NotReady(
        f"model {request.model!r} changed its version again and again during a request in {len(split.parts)} parts; "
        "try again"
    ).with_request_id(request_id)


def _call(
    request: InferenceRequest, version: Version, request_id: str, split: Split, number: int, joined: JoinedOutputs
) -> NodeCall:
    part = split.parts[number]
    alone = len(split.parts) == 1

    text = wire.document(part.inputs, part.outputs)
    header_lines = f"Content-Type: application/octet-stream\r\n{wire.HEADER_LENGTH}: {len(text)}\r\n"

    def outgoing(remaining_s: float) -> Outgoing:
        lines = header_lines + timeout_line(remaining_s)
        return Outgoing(lines, [text, *(tensor.data for tensor in part.inputs)])

    def destination(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
        return joined.destination(number, name, shape, dtype)

    def reply(direct: bool) -> DocumentReply:
        return Tensors(None if alone else destination, direct=direct)

    path = f"{model_path(request.model, version)}/infer"
    timeout_s, hedge_after_s = request.deadline.remaining(), request.hedge_after_s
    return NodeCall(
        "POST", path, timeout_s, outgoing, reply, repeat=True, hedge_after_s=hedge_after_s, request_id=request_id
    )


def timeout_line(remaining_s: float) -> str:
    """The header that tells the service how long the answer is waited for, in milliseconds.

    Not the protocol's parameter `timeout`: by the request's JSON the service knows requests again, and by this
    header its reactors know the time.
    """
    return f"X-Request-Timeout-Ms: {max(1, math.ceil(remaining_s * 1000))}\r\n"


def wanted_outputs(names: Sequence[str] | None, metadata: Mapping[str, Any]) -> list[wire.Output]:
    """The outputs that a request asks for; none stands for those of the dense part.

    MissingExtra or NotReady where it is not run: the service would answer rows.
    """
    why = (metadata.get("parameters") or {}).get("dense")
    if names is None and why is not None:
        message = f"model {metadata.get('name')!r}: the dense part is {why}"
        raise MissingExtra(message) if "install tierstore[" in str(why) else NotReady(message)
    return [wire.Output(name, {}) for name in names_of("outputs", names) or ()]


def output_named(outputs: Outputs, name: str) -> npt.NDArray[Any]:
    try:
        return outputs[name]
    except KeyError as error:
        raise TierstoreError(f"the service's answer lacks the output {error}") from error
