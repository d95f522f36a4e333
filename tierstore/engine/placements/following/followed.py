"""The protocol of a followed model, whose rows are on other machines: which version is current, and the new deltas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tierstore.engine.serving.order import ServingOrder
from tierstore.engine.serving.undone import Undone
from tierstore.errors import Conflict


@dataclass(frozen=True, slots=True)
class Pointer:
    """The state of a model at one moment. `generation` changes with every field but `seq` and `marks`.

    `current` is the version that serves, `order` that in which others served before it (None: it is not known),
    `canary` one that gets `share` (0 to 1) of the requests, `wanted` one that all nodes should make ready. `seq` is the
    newest delta of the log. `marks`: by version, the seq that all of its rows have reached. `line` is of the current
    version: it changes if its rows are replaced without a delta. `digest` is that of the delta `seq`, None if unknown.
    `server` changes if another server has the pointer, or a node upstream other deltas than before; it may lack
    acknowledged ones. A model that is not upstream is `recovering` then until all nodes have put back what they have.
    `owed`: the next delta, if it was acknowledged and is lost except for some of its rows. `undone`: the deltas that
    rollbacks have undone, and the lines of versions. `rollback`: the delta to which the model is being rolled back;
    `refused`: why the last one was impossible. `deactivated`: nothing is to serve, and that is known.
    """

    generation: int = 0
    current: int | None = None
    wanted: int | None = None
    seq: int | None = None
    marks: Mapping[int, int] = field(default_factory=dict)
    line: str = ""
    canary: int | None = None
    share: float = 0.0
    digest: str | None = None
    server: str = ""
    recovering: str | None = None
    order: ServingOrder | None = None
    undone: Undone = field(default_factory=Undone)
    rollback: int | None = None
    refused: str = ""
    deactivated: bool = False
    owed: int | None = None

    def order_of(self, versions: Iterable[int]) -> ServingOrder:
        """The order in which versions served, out of `versions` by their number where it is not known."""
        return ServingOrder.by_number(versions, self.current) if self.order is None else self.order


@dataclass(frozen=True, slots=True)
class LogEntry:
    seq: int
    digest: str
    data: bytes
    ms: int  # when it was acknowledged, since 1970
    after: str = ""  # the digest of the delta before it; empty if unknown


class Forked(Conflict):
    """The log has another delta than this node under a seq, or after it."""


class Followed(Protocol):
    """A model as the other machines have it. Any thread. StorageError if they cannot be reached."""

    forgetful: bool  # whether it may lose what it has acknowledged; then `put_back` brings it back

    def pointer(self) -> Pointer: ...

    def pointer_from_now(self) -> Pointer:
        """The pointer as it is after this call; `pointer` may be of a moment before."""

    def versions(self) -> dict[int, dict[str, Any]]:
        """By number: `{"state": …, "record": the content of version.json}`, with the record if the state is `ready`."""

    def files(self, number: int, loaded_at_s: float) -> dict[str, bytes]:
        """Side files of a version by their paths in its directory, of the load whose record has this `loaded_at_s`.

        Conflict if the version has another content by now: then its record is another one too.
        """

    def read(self, after: int, count: int) -> list[LogEntry]:
        """At most `count` entries above `after`, ascending. The first is not `after + 1` if the log begins later."""

    def put_back(self, seq: int, digest: str, data: bytes, after: str | None) -> bool:
        """Append a lost delta again; `after` is the digest of the delta before it. Forked if others have come since."""

    def beat(self, node: str, report: Mapping[str, Any]) -> object:
        """Report what this node serves."""
