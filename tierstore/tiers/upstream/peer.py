"""What a node asks of a peer, which serves the same models: what its logs hold, deltas of
them, and models file by file.

Any thread. Errors are those of `Node.get`: RemoteUnavailable where the peer does not answer, or answers what
is no answer of our service.
"""

from __future__ import annotations

from typing import Self
from urllib.parse import urlencode

from pydantic import model_validator

from tierstore.formats.backups import Backup
from tierstore.tiers.upstream.connections import Document, ModelName, Seq, UpstreamNode
from tierstore.tiers.upstream.wire import PREFIX, LoggedDelta

TIMEOUT_S = 30.0  # for what a peer has to read first
QUICK_TIMEOUT_S = 5.0


class PeerLog(Document):
    """What the log of a peer's model holds: deltas `start + 1` to `last`; both None where it has not begun."""

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
    """What a peer says of the delta logs of all its models. `node`: how the peer names itself.

    `copying`: it is bringing models to itself, so these may not be all.
    """

    node: str
    copying: bool
    models: dict[ModelName, PeerLog]


class PeerImage(Document):
    """A model as it was at one moment: `backup` once the peer has read it, which is `done` of `total` bytes before."""

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
        """One digest of deltas `after + 1` to `upto`; None where the peer does not hold them all (any more)."""
        query = urlencode({"after": after, "upto": upto})
        return self.node.document(_Digest, f"{PREFIX}/models/{model}/log?{query}", timeout_s=TIMEOUT_S).digest

    def deltas(self, model: str, after: int, count: int, largest: int) -> list[LoggedDelta]:
        """See `UpstreamNode.deltas`."""
        return self.node.deltas(model, after, count, timeout_s=TIMEOUT_S, largest=largest)

    def image(self, model: str) -> PeerImage:
        """The image of a model that the peer holds for us from now on, while we read it."""
        target = f"{PREFIX}/models/{model}/image"
        return self.node.document(PeerImage, target, timeout_s=TIMEOUT_S, method="POST")

    def read(self, model: str, content: str, begin: int, count: int) -> memoryview:
        """At most `count` bytes of a content of the image, from `begin` on. NotFound where the image is gone."""
        query = urlencode({"begin": begin, "count": count})
        target = f"{PREFIX}/models/{model}/image/{content}?{query}"
        return self.node.get(target, timeout_s=TIMEOUT_S, most=count)
