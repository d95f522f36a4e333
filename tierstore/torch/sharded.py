"""Deltas of a trainer whose tables are sharded over many ranks: `ShardedPublisher`. Every rank uses it from the thread
that trains, and calls it at the same step.

What survives: rows that were touched and not acknowledged stay in the next delta, whatever failed. After the job died,
the journal and the state in the checkpoint say which rows the service may have otherwise than the restored trainer.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed as dist

from tierstore.arguments import check_name
from tierstore.errors import Conflict, DeltaError, InvalidInput, NotFound, SequenceGap, TierstoreError, TooLarge
from tierstore.formats import files
from tierstore.formats.delta.writer import DeltaWriter
from tierstore.formats.times import TimeLike
from tierstore.torch.tables import BATCH_ROWS, managed_collisions_of

RowIds = npt.NDArray[np.int64]
_ROWS_FILE = re.compile(r"([0-9]{1,19})\.rows\.npz")
_DELTA_FILE = re.compile(r"([0-9]{1,19})\.arrow")
_TABLE = "table."  # before names of arrays, as some are names of NumPy's own parameters
_REFUSED = (Conflict, DeltaError, SequenceGap, TooLarge)  # a delta that the service will never have


class Published(NamedTuple):
    """What `publish` has sent: the seq of the newest delta that the service has, and how many rows it brought."""

    seq: int
    rows: int


class _Shard(NamedTuple):
    """A part of a table that this rank has: `values` from this row and column on."""

    row: int
    column: int
    values: torch.Tensor


class _Table(NamedTuple):
    """A table: its rows and numbers a row, over all ranks, and the shards that this rank answers for."""

    rows: int
    dim: int
    shards: list[_Shard]


class ShardedPublisher:
    """Publishes the rows that a sharded trainer has changed, of all ranks, as one delta after the other.

    >>> model = DistributedModelParallel(net, …)
    >>> model.init_torchrec_delta_tracker(DeltaTrackerConfig())
    >>> publisher = ShardedPublisher(model, "ctr", client, journal="checkpoints/journal")
    >>> for batch in batches:
    ...     step(model, batch)
    ...     publisher.publish()

    Every method is called by all ranks at the same step. The names of tables are those of TorchRec's configs, a row's
    key is its number, whatever the sharding.

    Args:
        model: TorchRec's DistributedModelParallel with its delta tracker, which says which rows were looked up.
        name: the name of the served model.
        target: a `Client` or `Store`; only rank 0 uses it, others may pass None.
        journal: a directory that outlives the job, as its checkpoints do; only rank 0 uses it. Before a delta is sent,
            it has the delta and the numbers of its rows.
        group: the process group of all ranks that have shards; best one of gloo, as what is gathered lies on the CPU.
        consumer: of the tracker, where it has several.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        target: Any,
        *,
        journal: str | Path,
        group: Any = None,
        consumer: str | None = None,
    ) -> None:
        find = getattr(model, "get_delta_tracker", None)
        self._tracker: Any = find() if find is not None else None
        if self._tracker is None:
            raise InvalidInput(
                f"expected a DistributedModelParallel with a delta tracker, got a {type(model).__name__} without one: "
                "call model.init_torchrec_delta_tracker(DeltaTrackerConfig()) first"
            )
        if found := managed_collisions_of(model):
            raise InvalidInput(
                f"table {found[0][0]!r} has managed collisions: its rows are slots, which pass from one id to another. "
                "Import it by raw id, as docs/migrate-torchrec.md has it, and write its deltas with DeltaWriter"
            )
        self._model, self._name, self._target = model, check_name("model", name), target
        self._group, self._consumer = group, consumer
        self._rank = dist.get_rank(group)
        self._root = 0 if group is None else dist.get_global_rank(group, 0)
        self._paths = _paths_of(self._tracker.fqn_to_feature_names())
        self._pending: dict[str, RowIds] = {}  # touched and not acknowledged; on rank 0 also of others, from before
        self._journal: _Journal | None = None
        self._unsent: tuple[int, bytes] | None = None  # of which nobody knows whether the service has it
        self._shards: dict[str, _Table] = {}
        self._seq: int | None = self._together(partial(self._begin, journal))[0]  # of the log; None: not asked yet

    @property
    def seq(self) -> int:
        """The newest delta that the service has of the model: the `delta_seq` of a snapshot that is written now."""
        return self._seq or 0

    def publish(self, *, dense: str | Path | bytes | None = None, event_time: TimeLike | None = None) -> Published:
        """Send all rows that were looked up since the last acknowledged delta, as they are now, as one delta.

        Call it after the optimizer's step. dense: a new dense part, of rank 0. On return the delta is durable and
        visible. Without rows or a dense part nothing is sent.

        Raises TierstoreError on every rank if one of them fails, or the service does not acknowledge: the service has
        all of the delta or nothing of it, and the next call sends what was not acknowledged.
        """
        rows = self._touched_anywhere()
        count = sum(map(len, rows.values()))
        more = self._together(lambda: dense is not None or self._unsent is not None)[0]
        if count or more:
            vectors = {name: self._gathered(name, numbers) for name, numbers in rows.items()}
            self._seq = self._together(partial(self._send, rows, vectors, dense, event_time))[0]
            self._pending = {}
        return Published(self.seq, count)

    def write_tables(self, snapshot: Any, **options: Any) -> None:
        """Write all tables, as they are now, into a `SnapshotWriter`, which only rank 0 has; others pass None.

        options: as for its `table`, such as `dtype`. Its features are the caller's to declare, and its `delta_seq` is
        `seq`.
        """
        self._together(self._touched)
        for name, table in self._shards.items():
            writer = None
            for first in range(0, table.rows, BATCH_ROWS):
                numbers = np.arange(first, min(first + BATCH_ROWS, table.rows))
                vectors = self._gathered(name, numbers)
                writer = self._together(
                    partial(self._written, writer, snapshot, name, numbers, vectors, options), own=True
                )

    def state_dict(self) -> dict[str, Any]:
        """What belongs into a checkpoint beside the model of this moment; the same on every rank."""
        rows = self._touched_anywhere()
        seq = self._together(lambda: self.seq)[0]
        return {"seq": seq, "rows": {name: torch.from_numpy(of) for name, of in rows.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, once the model has been restored from it, on any number of ranks.

        The next delta has the rows that were touched and not acknowledged at the time of the checkpoint, and those
        that were sent since then: the service has them as they were trained after the checkpoint.
        """
        self._together(self._touched)  # what the tracker has seen is of no training that counts
        self._pending = self._together(partial(self._resumed, state), own=True)

    def saved(self, state: Mapping[str, Any]) -> None:
        """The checkpoint with this state is durable, and earlier ones are not used any more: forget what those need."""
        if self._journal is not None:
            self._journal.forget(int(state["seq"]))

    # --- rank 0

    def _begin(self, journal: str | Path) -> int | None:
        """Read the journal: without a state every row that it names counts as touched. Returns the newest seq."""
        if self._rank:
            return None
        self._journal = _Journal(Path(journal))
        self._pending = self._journal.rows_since(0)
        self._unsent = self._journal.unsent()
        try:
            return self._newest()
        except TierstoreError:  # training may begin before the service does, or the model has its first snapshot
            return None

    def _resumed(self, state: Mapping[str, Any]) -> dict[str, RowIds]:
        """The rows that the next delta has after a restart."""
        if self._journal is None:
            return {}
        rows = {name: of.numpy() for name, of in state["rows"].items()}
        return _merged(rows, self._journal.rows_since(int(state["seq"])))

    def _newest(self) -> int:
        """The newest delta in the model's log."""
        models = self._target.status(self._name)["models"]
        last = models[self._name]["log"]["last"]
        if last is None:
            raise NotFound(f"model {self._name!r} has no version yet: load its first snapshot before publishing deltas")
        return int(last)

    def _written(
        self, writer: Any, snapshot: Any, name: str, numbers: RowIds, vectors: Any, options: Mapping[str, Any]
    ) -> Any:
        """Write rows into a table of a snapshot. Returns its writer, which begins with the first of them."""
        if self._rank == 0:
            writer = writer or snapshot.table(name, dim=vectors.shape[1], **options)
            writer.write(numbers, vectors)
        return writer

    def _send(
        self,
        rows: dict[str, RowIds],
        vectors: dict[str, Any],
        dense: str | Path | bytes | None,
        event_time: TimeLike | None,
    ) -> int:
        """Send what is unsent, then a delta of these rows. Returns the newest seq, once that is acknowledged."""
        if self._journal is None:
            return 0
        if self._seq is None:
            self._seq = self._newest()
        if self._unsent is not None:
            self._apply(self._journal, *self._unsent)
        if not rows and dense is None:
            return self._seq
        seq = self._seq + 1
        sink = io.BytesIO()
        with DeltaWriter(sink, model=self._name, seq=seq, event_time=event_time) as delta:
            for name, of in vectors.items():
                delta.upsert(name, rows[name], of)
            if dense is not None:
                delta.dense(dense)
        content = sink.getvalue()
        self._journal.note(seq, rows, content)
        self._unsent = seq, content
        self._apply(self._journal, seq, content)
        return seq

    def _apply(self, journal: _Journal, seq: int, content: bytes) -> None:
        try:
            self._target.apply_delta(content, model=self._name)
        except _REFUSED as error:
            self._unsent = None
            journal.acknowledge(seq)
            if isinstance(error, (Conflict, SequenceGap)):  # another writer; the next call goes on after it
                self._seq = self._newest()
                raise Conflict(
                    f"delta {seq} of {self._name!r} was not applied ({error}): does another trainer publish this "
                    f"model? Its log is at {self._seq}; the next call takes the seq after, and has the rows of this one"
                ) from error
            raise
        self._unsent = None
        journal.acknowledge(seq)
        self._seq = max(seq, self.seq)

    # --- every rank

    def _touched(self) -> dict[str, RowIds]:
        """Numbers of the rows, over all ranks, that this one knows to be touched and not acknowledged."""
        self._shards = self._tables()  # what may fail comes before the tracker forgets what it tells
        firsts = {name: {shard.row for shard in table.shards} or {0} for name, table in self._shards.items()}
        if several := [name for name, rows in firsts.items() if len(rows) > 1]:
            raise InvalidInput(f"table {several[0]!r}: expected one range of rows on a rank, got several")
        store = self._tracker.store
        # Tables that were quiet since the last call have empty lists, which the tracker fails to join.
        store.per_fqn_lookups = {path: of for path, of in store.per_fqn_lookups.items() if of}
        found = self._tracker.get_unique(self._consumer)
        rows = {}
        for name in (name for name, path in self._paths.items() if path in found):
            numbers = found[self._paths[name]].ids.detach().cpu().numpy().astype(np.int64)
            rows[name] = numbers + min(firsts[name])  # the tracker counts from the first row of the shard
        self._pending = _merged(self._pending, rows)
        return self._pending

    def _touched_anywhere(self) -> dict[str, RowIds]:
        """Numbers of the rows that any rank knows to be touched, by table; the same on every rank."""
        rows: dict[str, RowIds] = {}
        for each in self._together(self._touched):
            rows = _merged(rows, each)
        return {name: rows[name] for name in sorted(rows)}

    def _tables(self) -> dict[str, _Table]:
        """What this rank has of the tables now; asking for it writes back what lies in caches of theirs."""
        state = self._model.state_dict()
        return {name: _table_of(name, state[f"{path}.weight"], self._rank) for name, path in self._paths.items()}

    def _gathered(self, name: str, numbers: RowIds) -> Any:
        """The rows of a table, on rank 0 [n, dim]; on others nothing. Every rank sends those that it has."""
        parts = []
        for first in range(0, len(numbers), BATCH_ROWS):
            wanted = numbers[first : first + BATCH_ROWS]
            pieces = self._together(partial(self._pieces, name, wanted), to_root=True)
            parts.append(self._together(partial(self._assembled, name, wanted, pieces), own=True))
        return np.concatenate(parts) if self._rank == 0 else None

    def _pieces(self, name: str, wanted: RowIds) -> list[tuple[RowIds, int, Any]]:
        """What this rank has of rows: (places among those wanted, first column, numbers)."""
        pieces = []
        for shard in self._shards[name].shards:
            places = np.flatnonzero((wanted >= shard.row) & (wanted < shard.row + len(shard.values)))
            index = torch.from_numpy(wanted[places] - shard.row).to(shard.values.device)
            values = shard.values.detach().index_select(0, index).cpu()
            if values.dtype not in (torch.float16, torch.float32):
                values = values.float()
            pieces.append((places, shard.column, values.numpy()))
        return pieces

    def _assembled(self, name: str, wanted: RowIds, pieces: Sequence[Any]) -> Any:
        if self._rank:
            return None
        table = self._shards[name]
        found = [piece for of_rank in pieces for piece in of_rank]
        dtype = np.result_type(*(values.dtype for _, _, values in found)) if found else np.float32
        rows = np.empty((len(wanted), table.dim), dtype)
        missing = np.ones((len(wanted), table.dim), bool)
        for places, column, values in found:
            rows[places, column : column + values.shape[1]] = values
            missing[places, column : column + values.shape[1]] = False
        if missing.any():
            row = wanted[int(np.argmax(missing.any(axis=1)))]
            raise InvalidInput(f"table {name!r}, row {row}: no rank has all of its numbers; give a group of all ranks")
        return rows

    def _together(self, work: Callable[[], Any], *, to_root: bool = False, own: bool = False) -> Any:
        """Do something on every rank. Returns the results of all, in their order; with `to_root` on rank 0 alone, with
        `own` that of this rank.

        If it fails on one of them, every rank raises: none waits for another.
        """
        result, failure = None, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - the others wait, and are told
            failure = error
        said = None if failure is None else f"{type(failure).__name__}: {failure}"
        heard: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(heard, (said, None if own or to_root else result), group=self._group)
        if failure is not None:
            raise failure
        for rank, (why, _) in enumerate(heard):
            if why is not None:
                raise TierstoreError(f"rank {rank} failed, so that nothing counts as published: {why}")
        if not to_root:
            return result if own else [of for _, of in heard]
        results: Any = [None] * len(heard) if self._rank == 0 else None
        dist.gather_object(result, results, dst=self._root, group=self._group)
        return results


class _Journal:
    """The files of a publisher: which rows each delta had, and the delta that may not have arrived."""

    def __init__(self, directory: Path) -> None:
        self._directory = files.make_dir(directory.absolute())

    def note(self, seq: int, rows: Mapping[str, RowIds], content: bytes) -> None:
        """Durable before the delta is sent. The rows first: of a delta that is there they are known."""
        sink = io.BytesIO()
        arrays: dict[str, Any] = {f"{_TABLE}{name}": of for name, of in rows.items()}
        np.savez(sink, **arrays)
        files.publish_bytes(self._directory / f"{seq}.rows.npz", sink.getvalue())
        files.publish_bytes(self._directory / f"{seq}.arrow", content)

    def acknowledge(self, seq: int) -> None:
        """The service has this delta, or never will have it."""
        if (path := self._directory / f"{seq}.arrow").exists():
            files.remove_file(path)

    def unsent(self) -> tuple[int, bytes] | None:
        """The delta that an earlier run had no answer for."""
        found = self._named(_DELTA_FILE)
        if not found:
            return None
        return max(found), (self._directory / f"{max(found)}.arrow").read_bytes()

    def rows_since(self, seq: int) -> dict[str, RowIds]:
        """The rows of all deltas above `seq`."""
        rows: dict[str, RowIds] = {}
        for number in self._named(_ROWS_FILE):
            if number > seq:
                with np.load(self._directory / f"{number}.rows.npz") as archive:
                    rows = _merged(rows, {name.removeprefix(_TABLE): archive[name] for name in archive.files})
        return rows

    def forget(self, seq: int) -> None:
        for number in self._named(_ROWS_FILE):
            if number <= seq:
                files.remove_file(self._directory / f"{number}.rows.npz", durable=False)

    def _named(self, pattern: re.Pattern[str]) -> list[int]:
        return sorted(int(found[1]) for path in self._directory.iterdir() if (found := pattern.fullmatch(path.name)))


def _paths_of(paths: Iterable[str]) -> dict[str, str]:
    """The path of each table in the module, by its name."""
    found: dict[str, str] = {}
    for path in paths:
        name = check_name("table", path.rpartition(".")[2])
        if name in found:
            raise InvalidInput(f"two tables are named {name!r}, {found[name]} and {path}: rename one of them")
        found[name] = path
    if not found:
        raise InvalidInput("expected a model with a sharded EmbeddingBagCollection or EmbeddingCollection, got none")
    return found


def _table_of(name: str, weight: Any, rank: int) -> _Table:
    """What this rank has of a table: of a ShardedTensor, a DTensor, or of one that every rank has whole."""
    rows, dim = weight.shape
    parts: list[tuple[Any, Any]]  # offsets and numbers
    if hasattr(weight, "local_shards"):
        parts = [(each.metadata.shard_offsets, each.tensor) for each in weight.local_shards()]
    elif hasattr(weight, "to_local"):
        local = weight.to_local()
        if not hasattr(local, "local_offsets"):
            raise InvalidInput(f"table {name!r}: expected shards with their offsets, got a {type(local).__name__}")
        parts = list(zip(local.local_offsets(), local.local_shards(), strict=True))
    else:
        parts = [((0, 0), weight)] if rank == 0 else []
    return _Table(rows, dim, [_Shard(int(offsets[0]), int(offsets[1]), of) for offsets, of in parts])


def _united(parts: Iterable[RowIds]) -> RowIds:
    return np.unique(np.concatenate(list(parts)))


def _merged(one: Mapping[str, RowIds], other: Mapping[str, RowIds]) -> dict[str, RowIds]:
    """The rows of both, ascending and distinct."""
    names = [*one, *(name for name in other if name not in one)]
    return {name: _united(of[name] for of in (one, other) if name in of) for name in names}
