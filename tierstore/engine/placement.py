"""Where the rows of a store's models are: what the engine asks of the one object that knows,
which is chosen as a store opens.

`placements/` has the three there are: this machine, a cluster, nodes upstream. Nothing outside of it
asks where rows are. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

from tierstore.engine.deltas.origin import Origin
from tierstore.engine.versions.info import VersionInfo
from tierstore.engine.versions.rows import VersionRows
from tierstore.errors import TierstoreError
from tierstore.formats.delta.reader import Delta, DeltaHead
from tierstore.formats.names import VersionDirectory
from tierstore.formats.snapshot.manifest import Manifest
from tierstore.formats.snapshot.reader import Snapshot
from tierstore.ingest.bulkload import BulkLoad
from tierstore.ingest.results import BaseBuild
from tierstore.types import BaseKind, DeltaResult, ProgressFn

# What a placement may be unable to do, or leave to others. The fields of `ModelPlacement`
# besides `leads` are among them.
Act = Literal[
    "load", "held", "apply_delta", "activate", "force", "rollback", "rollback_to", "canary", "promote", "withdraw",
    "label",
    "unlabel", "deactivate", "drop", "export", "backup", "rebuild", "compare_unnamed", "serve_fronts", "verify_rows",
    "catch_up",
    "drop_surplus", "check_files", "adopt",
]  # fmt: skip


class Refusal(NamedTuple):
    """Why something is not done: the error, and its text, in which `{names}` stand for what the
    caller and the placement say.
    """

    error: type[TierstoreError]
    why: str


class Refusals:
    """The column of the table in `placements/refusals.py` that a placement has. Immutable.

    `words`: names in its texts.
    """

    def __init__(self, by_act: Mapping[Act, Refusal], **words: str) -> None:
        self._by_act, self._words = by_act, words

    def allow(self, act: Act) -> bool:
        """Whether the placement does it: for work that nobody has asked for."""
        return act not in self._by_act

    def check(self, act: Act, **words: object) -> None:
        """Raise what the table says, where the placement does not do it."""
        if (refusal := self._by_act.get(act)) is not None:
            raise refusal.error(refusal.why.format(**self._words, **words))

    def verbs(self, model: str) -> dict[str, Callable[..., NoReturn]]:
        """Functions that raise, for the fields of `ModelPlacement` that the placement does not have."""
        return {of.name: self._refusing(of.name, model) for of in fields(ModelPlacement) if of.name in self._by_act}

    def _refusing(self, verb: Any, model: str) -> Callable[..., NoReturn]:
        def refuse(*_: object, **__: object) -> NoReturn:
            self.check(verb, model=model)
            raise AssertionError(verb)

        return refuse


class LoadTarget(Protocol):
    """Where the rows of a load go."""

    base: BaseKind  # of the files that are built first
    keep_times: bool  # whether it has a place for the times of rows

    def claim(self, snapshot: Snapshot, identity: str) -> None:
        """Before anything is built. Conflict where there is, or may not be, such a version."""

    def place(
        self, bulk: BulkLoad, build: BaseBuild, where: VersionDirectory, snapshot: Snapshot, progress: ProgressFn
    ) -> None:
        """Bring what was built to where it is read, and compare it with what was built."""

    def publish(self, where: VersionDirectory, build: BaseBuild, manifest: Manifest) -> None:
        """Write the record: from here on the version is there. Side files are in `where` already."""

    def abandon(self, number: int) -> None:
        """After `claim`: the load has failed, and no other one can go on from it."""

    def activate(self, number: int, progress: ProgressFn) -> None:
        """Switch to what was loaded."""


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
class ModelPlacement:
    """What a placement has for one model. Arguments, results and errors of verbs are those of `Store`."""

    leads: Callable[
        [], bool
    ]  # of all nodes that a source feeds, whether this is the one that applies its deltas while it can
    load: Callable[[], LoadTarget]  # where the rows of a load go
    held: Callable[
        [DeltaHead], DeltaResult | None
    ]  # the result for a delta that was acknowledged before; it is not decoded
    apply_delta: ApplyDelta
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
    """Where the rows of all models of a store are."""

    refusals: Refusals  # what it does not do
    log_retention_s: float  # how long a delta stays in the log once nothing needs it

    def start(self) -> None:
        """Serve the models there are: each by its pointer (CURRENT, the cluster's, what nodes
        report), with its log replayed.
        """

    def close(self, close_models: Callable[[], None]) -> None:
        """Stop following pointers and logs, close the models, then what their rows were read by."""

    def loading(self, name: str) -> AbstractContextManager[None]:
        """Have a model for the length of a load. Of one that has nothing after that, nothing stays."""

    def adopt(self, name: str, directory: Path) -> None:
        """Move the directory of a model into the data directory, and serve it. Conflict where there is such a model."""

    def existing(self, name: str) -> ModelPlacement:
        """NotFound, naming those there are, for an unknown model."""

    def open_rows(self, name: str, info: VersionInfo) -> VersionRows:
        """The row store of a version. ConfigError where the rows are not of this placement, StorageError."""

    def add_status(self, document: dict[str, Any]) -> dict[str, Any]:
        """The status document of the store with what the placement adds to it."""

    @property
    def unheard(self) -> str | None:
        """Why there may be models that are not here yet; None where all are here."""

    @property
    def ready(self) -> bool:
        """Whether requests are wanted here: a model is served, or all models there are are here."""
