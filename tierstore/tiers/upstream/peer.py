"""Requests to a peer, a node that serves the same models: its logs, their deltas, and models file by file.

Any thread. Errors as `UpstreamNode.get`: RemoteUnavailable if the peer does not answer, or if the answer is not from our service.
"""

from __future__ import annotations

from typing import Self
from urllib.parse import urlencode

from pydantic import model_validator

from tierstore.formats.backups import Backup
from tierstore.tiers.upstream.connections import Document, ModelName, Seq, UpstreamNode
from tierstore.tiers.upstream.wire import PREFIX, LoggedDelta

TIMEOUT_S = 30.0  # for answers for which a peer must first read files
QUICK_TIMEOUT_S = 5.0


class PeerLog(Document):
    """The log of a peer's model: it holds deltas `start + 1` to `last`; both None if it has not begun."""

    active: int | None
    start: Seq | None
    last: Seq | None
    damage: str | None
    rollbacks: tuple[tuple[Seq, Seq], ...]

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.start is not None and self.last is not None and self.start > self.last:
            raise ValueError(f"expected `start` up to `last`, got {self.start} and {self.last}")
        return self


class PeerLogs(Document):
    """The delta logs of all models of a peer. `node`: the peer's own name.

    `copying`: the peer is fetching models, so there may be more.
    """

    node: str
    copying: bool
    models: dict[ModelName, PeerLog]


class PeerImage(Document):
    """A model as it was at one moment. `backup` is set once the peer has read it; before, it has read `done` of `total` bytes."""

    number: int
    backup: Backup | None = None
    done: int = 0
    total: int = 0


class _Digest(Document):
    digest: str | None


class Peer:
    """One peer."""

    def __init__(self, node: UpstreamNode) -> None:
        self.node = node

    def __str__(self) -> str:
        return str(self.node)

    def logs(self) -> PeerLogs:
        return self.node.document(PeerLogs, f"{PREFIX}/logs", timeout_s=QUICK_TIMEOUT_S)

    def digest(self, model: str, after: int, upto: int) -> str | None:
        """The digest of deltas `after + 1` to `upto`; None if the peer does not hold all of them."""
        query = urlencode({"after": after, "upto": upto})
        return self.node.document(_Digest, f"{PREFIX}/models/{model}/log?{query}", timeout_s=TIMEOUT_S).digest

    def deltas(self, model: str, after: int, count: int, largest: int) -> list[LoggedDelta]:
        """See `UpstreamNode.deltas`."""
        return self.node.deltas(model, after, count, timeout_s=TIMEOUT_S, largest=largest)

    def image(self, model: str) -> PeerImage:
        """The image of a model, which the peer keeps for us while we read it."""
        target = f"{PREFIX}/models/{model}/image"
        return self.node.document(PeerImage, target, timeout_s=TIMEOUT_S, method="POST")

    def read(self, model: str, content: str, begin: int, count: int) -> memoryview:
        """At most `count` bytes of a content of the image, from `begin` on. NotFound if the image is gone."""
        query = urlencode({"begin": begin, "count": count})
        target = f"{PREFIX}/models/{model}/image/{content}?{query}"
        return self.node.get(target, timeout_s=TIMEOUT_S, most=count)
