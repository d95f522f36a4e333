"""A model in the cluster: its versions, the pointer to the current one, its delta log, the lease, its nodes.

All of its keys have one hash tag, so a step that touches several of them is one script (`scripts.py`). Any thread of
any node may call anything. Changes of a call that returned are as durable as the cluster (docs/remote.md); after one
that was broken off, the call may be repeated.

Under `{ts:<model>}:` there are

- `current`, the pointer, a hash: what a model's document has (`current`, `left`, `wanted`, `canary`, `share`,
  `deactivated`, `undone`), `seq` and `digest` of the newest delta, `generation`, `mark:<version>` (all its rows have
  reached that seq), `rollback` (the delta to which the node with the lease is to roll back), `refused` (why it could
  not), and `server`, `recovering`, `owed` (docs/decisions/remote-models.md);
- `versions`, a hash: version → JSON with `state` (`loading`, `ready`, `dropping`), `tags`, `tables`, and the record;
- `files:<version>`, a hash: side files, by path;
- `log`, a stream: "<seq>-0" → `digest`, `ms`, `data`, `after` (the digest of the delta before it);
- `lease`, `epoch`: the node that applies deltas, and its fencing epoch;
- `nodes`, `alive`: what each node reports, and when it did;
- `load:<version>`: what is there of a load; `loader:<version>` and `loader:<version>:<part>`: leases of it and its
  parts;
- `heads:<version>`, a hash: the dense parts that deltas replaced, by seq and head, and the digests of these deltas.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import xxhash

from tierstore.engine.placements.cluster import scripts
from tierstore.engine.placements.following.followed import Forked, LogEntry, Pointer
from tierstore.engine.placements.following.version_copies import READY
from tierstore.engine.serving.order import ServingOrder
from tierstore.engine.serving.undone import Undone
from tierstore.errors import Conflict, Fenced, NotFound, NotReady, Overloaded, SequenceGap
from tierstore.formats.names import dense_file
from tierstore.tiers.answers import reading

MODELS = b"ts:models"  # a set: the names of all models
_TRIES = 50  # of a change that loses to others


_reading = reading("what the cluster has of a model")


class Recovering(Overloaded):
    """Another server has the log, and nodes are putting back what it may lack."""


class Owed(Conflict):
    """The cluster has lost an acknowledged delta, and takes no other one in its place."""


class LogClosed(Owed):
    """The log has lost its end, and takes no delta up to there again."""


class Commands(Protocol):
    """The needed part of a connected cluster. Raises StorageError if it cannot be reached."""

    def call(self, *words: Any) -> Any: ...


class SharedModel:
    """The keys of one model, under the hash tag `ts:<model>`. It is `Followed`."""

    forgetful = True

    def __init__(self, cluster: Commands, name: str) -> None:
        self._cluster, self.name = cluster, name
        base = f"{{ts:{name}}}:"
        self._current, self._versions, self._log = base + "current", base + "versions", base + "log"
        self._lease, self._epochs = base + "lease", base + "epoch"
        self._nodes, self._alive = base + "nodes", base + "alive"
        self._base = base

    def _run(self, script: str, keys: list[str], *args: Any) -> Any:
        return self._cluster.call("EVAL", script, len(keys), *keys, *args)

    # --- the pointer

    def pointer_from_now(self) -> Pointer:
        """`pointer`, which is asked for each time."""
        return self.pointer()

    @_reading
    def pointer(self) -> Pointer:
        """The pointer as it is now."""
        fields = _pairs(self._cluster.call("HGETALL", self._current))

        def number(name: str) -> int | None:
            text = fields.get(name, b"")
            return _natural(text) if text else None

        marks = {_natural(name[5:]): _natural(value) for name, value in fields.items() if name.startswith("mark:")}
        share = float(fields.get("share") or 0.0)
        if not 0 <= share <= 1:
            raise ValueError(f"expected a share of 0 to 1, got {share}")
        return Pointer(
            number("generation") or 0, number("current"), number("wanted"), number("seq"), marks,
            canary=number("canary"), share=share, digest=_digest_of(fields),
            server=fields.get("server", b"").decode(), recovering=fields.get("recovering", b"").decode() or None,
            order=ServingOrder.parse(json.loads(fields["left"])) if fields.get("left") else None,
            **_rollbacks_of(fields, number("current")), rollback=number("rollback"),
            refused=fields.get("refused", b"").decode(), deactivated=bool(fields.get("deactivated")),
            owed=_owed_of(fields),
        )  # fmt: skip

    def change(self, before: Pointer, **changes: float | str | None) -> bool:
        """Set fields of the pointer, if nothing but marks has changed since `before`; False otherwise."""
        words = [word for name, value in changes.items() for word in (name, "" if value is None else value)]
        seq = "" if before.seq is None else before.seq
        return bool(self._run(scripts.CHANGE, [self._current], before.generation, seq, *words))

    def update(self, changes: Callable[[Pointer], Mapping[str, float | str | None]]) -> None:
        """Set fields of the pointer, given its state at that moment; nothing if there are none. Conflict."""
        for _ in range(_TRIES):
            pointer = self.pointer()
            fields = changes(pointer)
            if not fields or self.change(pointer, **fields):
                return
        raise Conflict(f"model {self.name!r}: others change it all the time; try again")

    def forget_order(self, number: int) -> None:
        """Take a number out of the order of serving and of what rollbacks left: what is loaded under it now is new."""

        def without(pointer: Pointer) -> dict[str, str]:
            changes = {}
            if pointer.order is not None and number in pointer.order:
                changes["left"] = order_text(pointer.order.without([number]))
            if number in pointer.undone.outdated:
                changes["undone"] = json.dumps(pointer.undone.without([number]).document())
            return changes

        self.update(without)

    # --- versions

    @_reading
    def versions(self) -> dict[int, dict[str, Any]]:
        """The record of every version, ascending by number."""
        records = _pairs(self._cluster.call("HGETALL", self._versions))
        found = {_natural(number): _object(text) for number, text in records.items()}
        for number, of in found.items():
            ready = of["record"]["loaded_at_s"] if of["state"] == READY else 0.0
            if not isinstance(ready, (int, float)):
                raise ValueError(f"version {number}: expected when it was loaded, got {ready!r}")
        return dict(sorted(found.items()))

    def version(self, number: int) -> dict[str, Any]:
        """The record of a version. NotFound names the existing versions."""
        versions = self.versions()
        if number not in versions:
            raise NotFound(
                f"model {self.name!r} has no version {number}; it has {', '.join(map(str, versions)) or 'none'}"
            )
        return versions[number]

    def record(self, number: int, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> bool:
        """Replace the record of a version (None: there is none). False if it is neither `before` nor `after` by now."""
        if before is None and after is not None:
            self.list_model()
        done = bool(self._run(scripts.RECORD, [self._versions, self._current], number, _text(before), _text(after)))
        if before is None and after is not None:
            self.list_model()  # again: it may have been forgotten meanwhile, as it had no version
        return done

    def list_model(self) -> None:
        """Put the model on the list by which every node finds it."""
        self._cluster.call("SADD", MODELS, self.name)

    def forget_model(self) -> None:
        """Remove the model from the list, if it has no version and no log. Nodes then forget it."""
        if self._is_nothing():
            self._cluster.call("SREM", MODELS, self.name)
            if not self._is_nothing():
                self.list_model()

    def _is_nothing(self) -> bool:
        return not self.versions() and self.pointer().seq is None

    # --- side files

    def put_file(self, number: int, load: str, name: str, data: bytes) -> None:
        """Put a side file of a version there, unless there is one, or the load with the token `load` has ended."""
        self._run(scripts.PUT_FILE, [self._versions, f"{self._base}files:{number}"], number, load, name, data)

    @_reading
    def files(self, number: int, loaded_at_s: float) -> dict[str, bytes]:
        """Side files of a version (dense part, warm-up keys, recorded requests) by their paths in its directory.

        Conflict, NotFound: see `Followed`.
        """
        found = _pairs(self._cluster.call("HGETALL", f"{self._base}files:{number}"))
        found |= self._replaced_by_lost(number)
        of = self.version(number)  # afterwards: a load puts its files there before its record
        if of["state"] != READY or of["record"]["loaded_at_s"] != loaded_at_s:
            raise Conflict(f"version {number} of {self.name!r} was loaded anew: its files are not those of its record")
        return found

    def _replaced_by_lost(self, number: int) -> dict[str, bytes]:
        """By file, the dense parts that deltas have replaced which the log has lost since."""
        kept = self._kept_heads(number)
        mark = self.pointer().marks.get(number, -1) if kept else 0  # afterwards: a delta's dense part comes before it
        for seq in sorted({seq for seq, head in kept if head is None and seq > mark}):
            entries = self.read(seq - 1, 1)
            there = entries[0].digest if entries and entries[0].seq == seq else ""
            if self._cluster.call("HGET", f"{self._base}heads:{number}", seq) not in (None, there.encode()):
                lost = [(of, head) for of, head in kept if of >= seq and head is not None]
                graphs = [
                    self._cluster.call("HGET", f"{self._base}heads:{number}", f"{of} {head}") for of, head in lost
                ]
                # of a head's, the one that the first of them has replaced
                return {dense_file(head): graph or b"" for (_, head), graph in zip(lost, graphs, strict=True)}
        return {}

    def remove_files(self, number: int, record: Mapping[str, Any]) -> bool:
        """Remove the keys of a version under the model's own tag. False if its record is not `record` by now."""
        names = [f"{self._base}{what}:{number}" for what in ("files", "load", "heads")]
        keys = [self._versions, self._current, *names]
        return bool(self._run(scripts.REMOVE_FILES, keys, number, _text(record)))

    def put_heads(self, epoch: int, number: int, seq: int, digest: str, graphs: Mapping[str, bytes]) -> None:
        """Put the dense parts of a delta there, by head, and keep those that they replace; what was kept before is left
        alone. Fenced.
        """
        words = [word for head, graph in graphs.items() for word in (f"{seq} {head}", dense_file(head), graph)]
        self._change_heads(scripts.PUT_HEADS, number, [epoch, seq, digest], words)

    @_reading
    def put_heads_back(self, epoch: int, number: int, after: int) -> None:
        """Put the dense parts back that deltas above `after` have replaced, and keep them no longer. Fenced."""
        words: list[Any] = []
        for seq, head in self._kept_heads(number):
            if seq > after:
                words += [seq, ""] if head is None else [f"{seq} {head}", dense_file(head)]
        self._change_heads(scripts.PUT_HEADS_BACK, number, [epoch], words)

    def _kept_heads(self, number: int) -> list[tuple[int, str | None]]:
        """(seq of a delta, a head that it has replaced), the newest first; None for that of the delta itself."""
        kept: list[tuple[int, str | None]] = []
        for field in self._cluster.call("HKEYS", f"{self._base}heads:{number}"):
            seq, is_head, head = field.decode().partition(" ")
            kept.append((_natural(seq), head if is_head else None))
        return sorted(kept, key=lambda of: (-of[0], of[1] is None))

    def _change_heads(self, script: str, number: int, first: list[Any], words: list[Any]) -> None:
        keys = [self._lease, f"{self._base}files:{number}", f"{self._base}heads:{number}"]
        if words and not self._run(script, keys, *first, *words):
            raise Fenced(f"the dense parts of version {number} of {self.name!r}: the lease is another node's")

    def forget_heads(self, number: int, upto: int) -> None:
        """Deltas up to `upto` are not rolled back any more."""
        fields = self._cluster.call("HKEYS", f"{self._base}heads:{number}")
        if old := [field for field in fields if int(field.split(b" ")[0]) <= upto]:
            self._cluster.call("HDEL", f"{self._base}heads:{number}", *old)

    # --- the log

    def append(self, seq: int, digest: str, data: bytes | memoryview, after: str | None) -> bool:
        """Acknowledge a delta: put it into the log. False if the log has it already. Conflict and SequenceGap as for
        any delta.

        `after` is the digest of the delta before it, if the caller has it. Forked if the log has another delta there.
        Recovering if the log may lack acknowledged deltas, which nodes are putting back.
        """
        return self._append(seq, digest, data, after, again=False)

    def put_back(self, seq: int, digest: str, data: bytes, after: str | None) -> bool:
        """See `Followed`. False if the log has it already, does not reach so far, or does not take it any more."""
        try:
            return self._append(seq, digest, data, after, again=True)
        except (SequenceGap, LogClosed):
            return False
        except Conflict as error:
            raise Forked(str(error)) from error

    @_reading
    def _append(self, seq: int, digest: str, data: bytes | memoryview, after: str | None, *, again: bool) -> bool:
        keys = [self._current, self._log, self._nodes, self._alive]
        words = (seq, seq - 1, digest, int(time.time() * 1000), bytes(data), after or "", int(again))
        outcome, last, there = ((of or b"").decode() for of in self._run(scripts.APPEND, keys, *words))
        what = f"delta {seq} of {self.name!r}"
        if outcome == "appended":
            return True
        if outcome == "none":
            raise NotReady(f"model {self.name!r} has no active version; load or activate one before sending deltas")
        if outcome == "recovering":
            raise Recovering(f"{what} is not taken yet: a server of the cluster was replaced; send it again")
        if outcome == "forked":
            raise Forked(f"{what} is not taken: this node has another delta {seq - 1} than the cluster; send it again")
        newest = int(last)
        if outcome == "owed":
            raise Owed(owed_text(self.name, seq))
        if outcome == "lost":
            raise LogClosed(
                f"{what} is not taken: the log in the cluster has had deltas up to {newest} and has lost them, and "
                f"takes none up to that again; load a snapshot with a delta_seq of {newest} or more"
            )
        if seq > newest:
            raise SequenceGap(f"{what} came out of turn; {newest + 1} is next", expected_seq=newest + 1)
        if seq < newest or not there:
            held = self.read(seq - 1, 1)
            there = held[0].digest if held and held[0].seq == seq else ""
        if there and there != digest:
            raise Conflict(f"{what} is held with other content; give new content a new seq, {newest + 1} is next")
        return False

    def recovered(self, recovering: str, reached: int | None, digest: str, owed: tuple[int, str] | None) -> bool:
        """Accept new deltas again, once every node has put back what it has. False if some are still waited for.

        `reached` is the seq that all rows have, `digest` that of its delta: the log goes on after it, even if it does
        not have it any more. `owed`: the delta, with its digest, of which some rows are there and others are not.
        """
        keys = [self._current, self._nodes, self._alive, self._log]
        words = (
            recovering,
            "" if reached is None else reached,
            digest,
            "" if owed is None else f"{owed[0]} {owed[1]}",
        )
        return bool(self._run(scripts.RECOVERED, keys, *words))

    @_reading
    def read(self, after: int, count: int) -> list[LogEntry]:
        """At most `count` entries above `after`, ascending. The first is not `after + 1` if the log begins later."""
        entries: list[LogEntry] = []
        for name, fields in self._cluster.call("XRANGE", self._log, f"({after}-0", "+", "COUNT", count) or ():
            of = _pairs(fields)
            seq, before = _natural(name.split(b"-")[0]), of.get("after", b"").decode()
            if seq <= (entries[-1].seq if entries else after) or len(entries) == count:
                raise ValueError(f"expected at most {count} deltas above {after}, ascending, got delta {seq}")
            if xxhash.xxh3_64_hexdigest(of["data"]).encode() != of["digest"]:
                raise ValueError(f"delta {seq} does not match its digest")
            entries.append(LogEntry(seq, of["digest"].decode(), of["data"], _natural(of["ms"]), before))
        return entries

    # --- the lease, and the nodes

    @_reading
    def acquire(self, owner: str, ttl_s: float, above: int = 0) -> int | None:
        """The fencing epoch, if `owner` gets the lease for `ttl_s` more; None if another node has it.

        It is above the epoch `above`: epochs that were given out may be lost with a server.
        """
        return int(self._run(scripts.ACQUIRE, [self._lease, self._epochs], owner, int(ttl_s * 1000), above)) or None

    def release(self, owner: str) -> None:
        self._run(scripts.RELEASE, [self._lease], owner)

    @_reading
    def lease(self) -> tuple[str, int] | None:
        """(owner, epoch) of the lease; None if nobody has it."""
        held = self._cluster.call("GET", self._lease)
        if not held:
            return None
        owner, epoch = held.decode().split(" ")
        return owner, _natural(epoch)

    def progress(self, epoch: int, number: int, before: int | None, mark: int, trim_below: int | None = None) -> bool:
        """Report that all rows of a version have reached `mark`, and cut the log off.

        False if the lease is lost, or the mark is not `before` any more.
        """
        words = [f"mark:{number}", *("" if seq is None else seq for seq in (before, mark, trim_below))]
        return bool(self._run(scripts.PROGRESS, [self._lease, self._current, self._log], epoch, *words))

    @_reading
    def beat(self, node: str, report: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
        """Report that a node is there (None: only read), and return the reports of all such nodes."""
        keys = [self._nodes, self._alive, self._current, self._log]
        found = self._run(scripts.BEAT, keys, node, "" if report is None else json.dumps(report))
        return {name: _object(text) for name, text in _pairs(found).items()}

    def withdraw_node(self, node: str) -> None:
        """Remove a node that ends, so that nobody waits for it."""
        self._cluster.call("HDEL", self._nodes, node)
        self._cluster.call("ZREM", self._alive, node)


@_reading
def model_names(cluster: Commands) -> list[str]:
    """The names of a cluster's models, sorted."""
    return sorted(name.decode() for name in cluster.call("SMEMBERS", MODELS))


def owed_text(model: str, seq: int) -> str:
    """How a delta is described that the cluster has lost, except for some of its rows."""
    return (
        f"delta {seq} of {model!r} was acknowledged with other content, of which rows are in the cluster, before its "
        "log was lost: send that content, or load a newer snapshot"
    )


def order_text(order: ServingOrder) -> str:
    """An order as a field of the pointer."""
    return json.dumps(order.document())


def _natural(text: Any) -> int:
    """Parse a number that fits into 63 bits."""
    number = int(text)
    if not 0 <= number < 1 << 63:
        raise ValueError(f"expected a number of 0 to {(1 << 63) - 1}, got {str(text)[:40]}")
    return number


def _object(text: Any) -> dict[str, Any]:
    """Parse a JSON object."""
    document = json.loads(text)
    if not isinstance(document, dict):
        raise TypeError(f"expected an object, got {type(document).__name__}")
    return document


def _digest_of(fields: Mapping[str, bytes]) -> str | None:
    """The digest of the newest delta; None if the stored one is of another delta."""
    seq, _, digest = fields.get("digest", b"").partition(b" ")
    return digest.decode() or None if seq == fields.get("seq") else None


def _rollbacks_of(fields: Mapping[str, bytes], current: int | None) -> dict[str, Any]:
    """The pointer's `undone`, and the line of the current version."""
    undone = Undone.parse(json.loads(fields["undone"])) if fields.get("undone") else Undone()
    return {"undone": undone, "line": line_text(undone.line(current or 0))}


def line_text(line: int) -> str:
    """The line of a version's rows as a pointer has it."""
    return str(line) if line else ""


def _owed_of(fields: Mapping[str, bytes]) -> int | None:
    """The delta that is owed, if it is the next one of the log."""
    named = fields.get("owed", b"").partition(b" ")[0]
    owed = _natural(named) if named else None
    return owed if owed is not None and owed == _natural(fields.get("seq") or 0) + 1 else None


def _text(record: Mapping[str, Any] | None) -> str:
    return "" if record is None else json.dumps(record, sort_keys=True, separators=(",", ":"))


def _pairs(reply: Any) -> dict[str, Any]:
    """A hash as the driver returns it (a mapping, or names and values in turn), as a dict.

    Kvrocks answers nil for an empty value of a stream's entry.
    """
    items = reply.items() if isinstance(reply, Mapping) else zip(reply[::2], reply[1::2], strict=True)
    return {
        name.decode() if isinstance(name, bytes) else str(name): b"" if value is None else value
        for name, value in items
    }
