"""What a node follows of a model whose rows are on other machines: which version is
current, and the deltas that come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tierstore.errors import Conflict


@dataclass(frozen=True, slots=True)
class Pointer:
    """What holds of a model at one moment. `generation` moves with each change of it but those of `seq` and `marks`.

    `current` is the version that serves, `previous` the one before it, `canary` one that gets `share` (0 to 1) of the
    requests, `wanted` one that all nodes are to make ready. `seq` is the newest delta of the log. `marks`: by version,
    the seq that every one of its rows has reached. `line` is of the current version: it changes where its rows are
    replaced by others that no delta brings. `digest` is that of the delta `seq`, None where it is not known. `server`
    changes where another server has the pointer, which may lack what was acknowledged; it is `recovering` then until
    all nodes have put back what they have.
    """

    generation: int = 0
    current: int | None = None
    previous: int | None = None
    wanted: int | None = None
    seq: int | None = None
    marks: Mapping[int, int] = field(default_factory=dict)
    line: str = ""
    canary: int | None = None
    share: float = 0.0
    digest: str | None = None
    server: str = ""
    recovering: str | None = None


@dataclass(frozen=True, slots=True)
class LogEntry:
    seq: int
    digest: str
    data: bytes
    ms: int  # when it was acknowledged, since 1970
    after: str = ""  # the digest of the delta before it; empty where that is not known


class Forked(Conflict):
    """The log has another delta than this node under a seq, or after it."""


class Followed(Protocol):
    """A model as the other machines have it. Any thread. StorageError where they cannot be reached."""

    forgetful: bool  # may lose what it has acknowledged; then `put_back` brings it back

    def pointer(self) -> Pointer: ...

    def versions(self) -> dict[int, dict[str, Any]]:
        """By number: `{"state": …, "record": what version.json has}`, the record where the state is `ready`."""

    def files(self, number: int) -> dict[str, bytes]:
        """Side files of a version by their paths in its directory."""

    def read(self, after: int, count: int) -> list[LogEntry]:
        """At most `count` entries above `after`, ascending. The first is not `after + 1` where the log begins later."""

    def put_back(self, seq: int, digest: str, data: bytes, after: str | None) -> bool:
        """Append again what was lost; `after` is the digest of the delta before it.

        Forked where others have come since.
        """

    def beat(self, node: str, report: Mapping[str, Any]) -> object:
        """Say what this node serves."""
