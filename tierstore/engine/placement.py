"""Placements: the protocol of the object that knows where the rows of a store's models are.

One is chosen as a store opens. `placements/` has the three: this machine, a cluster, nodes upstream. Nothing outside
of it asks where rows are. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

from tierstore.engine.deltas.incoming import Incoming
from tierstore.engine.deltas.origin import Origin
from tierstore.engine.versions.info import VersionInfo
from tierstore.engine.versions.rows import VersionRows
from tierstore.errors import TierstoreError
from tierstore.formats.delta.reader import Delta, DeltaHeader
from tierstore.formats.names import VersionDirectory
from tierstore.formats.snapshot.manifest import Manifest
from tierstore.formats.snapshot.reader import Snapshot
from tierstore.ingest.bulkload import BulkLoad
from tierstore.ingest.results import BaseBuild
from tierstore.types import BaseKind, DeltaResult, Partitions, ProgressFn

# Acts that a placement may be unable to do, or leave to others. The fields of `ModelVerbs` besides `leads` are
# among them.
Act = Literal[
    "load", "held", "apply_delta", "next_in_run", "apply_run",
    "activate", "force", "rollback", "rollback_to", "canary", "promote", "withdraw",
    "label",
    "unlabel", "deactivate", "drop", "export", "backup", "compare_unnamed", "serve_fronts", "verify_rows",
    "catch_up",
    "drop_surplus", "check_files", "adopt", "keep_state",
]  # fmt: skip


class Refusal(NamedTuple):
    """A refusal: the error, and its text, in which `{names}` are filled in by the caller and the placement."""

    error: type[TierstoreError]
    why: str


class Refusals:
    """A placement's column of the table in `placements/refusals.py`. Immutable. `words`: names in its texts."""

    def __init__(self, by_act: Mapping[Act, Refusal], **words: str) -> None:
        self._by_act, self._words = by_act, words

    def allow(self, act: Act) -> bool:
        """Whether the placement does this act: for work that nobody has requested."""
        return act not in self._by_act

    def check(self, act: Act, **words: object) -> None:
        """Raise the table's error if the placement does not do this act."""
        if (refusal := self._by_act.get(act)) is not None:
            raise refusal.error(refusal.why.format(**self._words, **words))

    def verbs(self, model: str) -> dict[str, Callable[..., NoReturn]]:
        """Functions that raise, for the fields of `ModelVerbs` that the placement does not have."""
        return {of.name: self._refusing(of.name, model) for of in fields(ModelVerbs) if of.name in self._by_act}

    def _refusing(self, verb: Any, model: str) -> Callable[..., NoReturn]:
        def refuse(*_: object, **__: object) -> NoReturn:
            self.check(verb, model=model)
            raise AssertionError(verb)

        return refuse


class Building(Protocol):
    """Builds the files of a snapshot, or of some partitions of its rows, for the length of a block."""

    def __call__(
        self, snapshot: Snapshot, own: Partitions | None, *, progress: ProgressFn, began_s: int | None = None
    ) -> AbstractContextManager[tuple[BulkLoad, BaseBuild]]: ...


class LoadTarget(Protocol):
    """The target of a load: where its rows go."""

    base: BaseKind  # of the files that are built first
    keep_times: bool  # whether it can keep the times of rows

    def claim(self, snapshot: Snapshot, identity: str) -> None:
        """Claim the version before anything is built. Conflict if there is such a version, or may not be."""

    def place(
        self, build: Building, where: VersionDirectory, snapshot: Snapshot, progress: ProgressFn
    ) -> BaseBuild | None:
        """Build the rows' files, all at once or part by part, move them to where they are read, and compare the result
        with what was built. Returns what was built, None if the version is there by another node's load.
        """

    def record(self, where: VersionDirectory, build: BaseBuild, manifest: Manifest) -> dict[str, Any]:
        """The content of the version's record, with which it can be read before it is there for others."""

    def publish(self, where: VersionDirectory, number: int, record: dict[str, Any]) -> bool:
        """Write the record: from here on the version is there. Side files are in `where` already. False if another
        node's load has done so.
        """

    def abandon(self, number: int, error: BaseException) -> None:
        """After `claim`: the load has failed by an error after which no other one can go on from what is on this
        machine.
        """

    def activate(self, number: int, progress: ProgressFn) -> None:
        """Switch to the loaded version."""


class ApplyDelta(Protocol):
    def __call__(self, delta: Delta, data: bytes | memoryview, origin: Origin | None = None) -> DeltaResult: ...


class Activate(Protocol):
    def __call__(self, number: int, *, force: bool, expected_active: int | None, progress: ProgressFn) -> None: ...


class Rollback(Protocol):
    def __call__(self, *, force: bool, expected_active: int | None, progress: ProgressFn) -> int: ...


class RollbackTo(Protocol):
    def __call__(self, seq: int, *, expected_active: int | None, progress: ProgressFn) -> int: ...


class Canary(Protocol):
    def __call__(self, number: int, share: float, *, force: bool, progress: ProgressFn) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVerbs:
    """The verbs of a placement for one model. Arguments, results and errors are those of `Store`."""

    leads: Callable[
        [], bool
    ]  # whether this node is the one that applies a source's deltas, of all nodes that the source feeds
    load: Callable[[], LoadTarget]  # where the rows of a load go
    held: Callable[
        [DeltaHeader], DeltaResult | None
    ]  # the result for a delta that was acknowledged before; it is not decoded
    apply_delta: ApplyDelta
    next_in_run: Callable[[], int | None]  # the seq with which `apply_run` begins; None while it takes none
    apply_run: Callable[[Sequence[Incoming]], int]  # of deltas that are next; how many could be applied together
    activate: Activate
    rollback: Rollback
    rollback_to: RollbackTo
    canary: Canary
    promote: Callable[[], int]
    withdraw: Callable[[], int]
    label: Callable[[str, int], None]
    unlabel: Callable[[str], None]
    deactivate: Callable[[], None]
    drop: Callable[[int], None]


class Placement(Protocol):
    """The place of the rows of all models of a store."""

    refusals: Refusals  # what it does not do
    log_retention_s: float  # how long a delta stays in the log once nothing needs it

    def start(self) -> None:
        """Serve all models: each by its pointer (its document, the cluster's, what nodes report), its log replayed."""

    def close(self, close_models: Callable[[], None]) -> None:
        """Stop following pointers and logs, close the models, then the readers of their rows."""

    def loading(self, name: str) -> AbstractContextManager[None]:
        """Keep a model for the length of a load. If it has nothing after that, nothing remains."""

    def adopt(self, name: str, directory: Path) -> None:
        """Move the directory of a model into the data directory, and serve it. Conflict if there is such a model."""

    def existing(self, name: str) -> ModelVerbs:
        """The placement of a model. NotFound names the existing ones."""

    def open_rows(self, name: str, info: VersionInfo) -> VersionRows:
        """The row store of a version. ConfigError if the rows are not of this placement, StorageError."""

    def add_status(self, document: dict[str, Any]) -> dict[str, Any]:
        """The status document of the store with the placement's additions."""

    @property
    def unheard(self) -> str | None:
        """Why there may be models that are not here yet; None if all are here."""

    @property
    def ready(self) -> bool:
        """Whether requests should be sent here: a model is served, or all existing models are here."""
