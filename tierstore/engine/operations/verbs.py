"""What changes a model, as users call it: by its own parts where its rows are on this machine. Any thread.

`nodes/member.py` has the same verbs for a model in a cluster, `upstream/front.py` refuses them all.
"""

from __future__ import annotations

from typing import Protocol

from tierstore.engine.deltas.origin import Origin
from tierstore.engine.model import Model
from tierstore.formats.delta.reader import Delta
from tierstore.types import DeltaResult, ProgressFn


class Verbs(Protocol):
    """Arguments, results and errors as those of `Store`."""

    def apply_delta(
        self, delta: Delta, data: bytes | memoryview, origin: Origin | None = None
    ) -> DeltaResult: ...  # a cluster's log has no origins

    @property
    def leads(self) -> bool: ...  # of all nodes that a source feeds, the one that applies its deltas while it can

    def activate(self, number: int, *, force: bool, expected_active: int | None, progress: ProgressFn) -> None: ...
    def rollback(self, *, force: bool, expected_active: int | None, progress: ProgressFn) -> int: ...
    def rollback_to(self, seq: int, *, expected_active: int | None, progress: ProgressFn) -> int: ...
    def canary(self, number: int, share: float, *, force: bool, progress: ProgressFn) -> None: ...
    def promote(self) -> int: ...
    def withdraw(self) -> int: ...
    def label(self, name: str, number: int) -> None: ...
    def unlabel(self, name: str) -> None: ...
    def deactivate(self) -> None: ...
    def drop(self, number: int) -> None: ...


class LocalVerbs:
    """Of a model on this machine."""

    def __init__(self, model: Model) -> None:
        self.apply_delta = model.apply_delta
        self.activate, self.rollback = model.switcher.activate, model.switcher.rollback
        self.rollback_to = model.switcher.rollback_to
        self.canary, self.promote = model.switcher.canary, model.switcher.promote
        self.deactivate = model.switcher.deactivate
        self.withdraw, self.label, self.unlabel = model.routes.withdraw, model.routes.label, model.routes.unlabel
        self.drop = model.drops.drop
        self.leads = True
