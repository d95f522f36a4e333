"""What a node asks of a peer, which serves the same models: what its logs hold, deltas of
them, and models file by file.

Any thread. Errors are those of `Node.get`: RemoteUnavailable where the peer does not answer, or answers what
is no answer of our service.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple
from urllib.parse import urlencode

import xxhash
from pydantic import ValidationError

from tierstore.errors import Corruption, RemoteUnavailable
from tierstore.formats.backups import Backup
from tierstore.tiers.upstream.connections import UpstreamNode
from tierstore.tiers.upstream.wire import PREFIX, LoggedDelta, decode_entries

TIMEOUT_S = 30.0  # for what a peer has to read first
QUICK_TIMEOUT_S = 5.0


class PeerLog(NamedTuple):
    """What the log of a peer's model holds: deltas `start + 1` to `last`; both None where it has not begun."""

    active: int | None
    start: int | None
    last: int | None
    damage: str | None
    rollbacks: tuple[tuple[int, int], ...]


class PeerLogs(NamedTuple):
    """What a peer says of the delta logs of all its models. `node`: how the peer names itself.

    `copying`: it is bringing models to itself, so these may not be all.
    """

    node: str
    copying: bool
    models: dict[str, PeerLog]


class PeerImage(NamedTuple):
    """A model as it was at one moment: `backup` once the peer has read it, which is `done` of `total` bytes before."""

    number: int
    backup: Backup | None
    done: int = 0
    total: int = 0


class Peer:
    """One peer."""

    def __init__(self, node: UpstreamNode) -> None:
        self.node = node

    def __str__(self) -> str:
        return str(self.node)

    def logs(self) -> PeerLogs:
        document = self.node.get_json(f"{PREFIX}/logs", timeout_s=QUICK_TIMEOUT_S)
        try:
            models = {str(name): _log_of(log) for name, log in document["models"].items()}
            return PeerLogs(str(document["node"]), bool(document["copying"]), models)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._no_answer("logs", error) from error

    def digest(self, model: str, after: int, upto: int) -> str | None:
        """One digest of deltas `after + 1` to `upto`; None where the peer does not hold them all (any more)."""
        query = urlencode({"after": after, "upto": upto})
        document = self.node.get_json(f"{PREFIX}/models/{model}/log?{query}", timeout_s=TIMEOUT_S)
        return document.get("digest")

    def deltas(self, model: str, after: int, count: int) -> list[LoggedDelta]:
        """At most `count` deltas from `after + 1` on, checked by their digests; none where the log begins later.

        Corruption.
        """
        query = urlencode({"after": after, "count": count})
        entries = decode_entries(self.node.get(f"{PREFIX}/models/{model}/deltas?{query}", timeout_s=TIMEOUT_S))
        for at, entry in enumerate(entries, after + 1):
            if entry.seq != at or xxhash.xxh3_64_hexdigest(entry.data) != entry.digest:
                raise Corruption(
                    f"{self}: delta {at} of {model!r} was damaged on its way: it does not match its digest"
                )
        return entries

    def image(self, model: str) -> PeerImage:
        """The image of a model that the peer holds for us from now on, while we read it."""
        document = self.node.post_json(f"{PREFIX}/models/{model}/image", timeout_s=TIMEOUT_S)
        try:
            number, backup = int(document["number"]), document.get("backup")
            if backup is None:
                return PeerImage(number, None, int(document["done"]), int(document["total"]))
            return PeerImage(number, Backup.model_validate_json(json.dumps(backup)))
        except (KeyError, TypeError, ValueError, ValidationError) as error:
            raise self._no_answer("an image", error) from error

    def read(self, model: str, content: str, begin: int, count: int) -> bytearray:
        """At most `count` bytes of a content of the image, from `begin` on. NotFound where the image is gone."""
        query = urlencode({"begin": begin, "count": count})
        return self.node.get(f"{PREFIX}/models/{model}/image/{content}?{query}", timeout_s=TIMEOUT_S)

    def _no_answer(self, what: str, error: Exception) -> RemoteUnavailable:
        return RemoteUnavailable(f"{self}: expected {what} as this release writes them, got something else: {error}")


def _log_of(document: dict[str, Any]) -> PeerLog:
    rollbacks = tuple((int(to), int(last)) for to, last in document["rollbacks"])
    active, start, last = (
        None if document[name] is None else int(document[name]) for name in ("active", "start", "last")
    )
    return PeerLog(active, start, last, document["damage"], rollbacks)
