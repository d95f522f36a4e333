"""A store of one version in dictionaries: the oracle of the look-up tests, and one that can be made to wait.

Test code; the fake's look-ups may come from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from tierstore.access.audit import Audit
from tierstore.config import Settings
from tierstore.engine.lifecycle.throttle import LookupTimes
from tierstore.engine.serving.epochs import Epochs
from tierstore.errors import Conflict, NotFound, NotReady, TierstoreError
from tierstore.formats.keys import as_codes
from tierstore.types import Combiner, DeltaResult, FeatureSpec, KeyType, StorageDtype, TableSpec

VERSION = 20261120
ITEMS = {-(1 << 63): 7.0, (1 << 63) - 1: 8.0, **{key: float(key) for key in range(100)}}
USERS = {f"u{i}": float(i) for i in range(50)} | {"": 0.5, "λ": 0.25}
DEFAULT = -1.0  # the value whose row is the default of the table `item`

TABLES = {
    "item": TableSpec("item", KeyType.INT64, 4, StorageDtype.FLOAT32, (-1.0, -2.0, -3.0, -4.0)),
    "user": TableSpec("user", KeyType.STRING, 8, StorageDtype.FLOAT32),
    "big": TableSpec("big", KeyType.UINT64, 2, StorageDtype.FLOAT32),
}
FEATURES = {
    "item_id": FeatureSpec("item_id", "item"),
    "clicked": FeatureSpec("clicked", "item", Combiner.MEAN),
    "user": FeatureSpec("user", "user"),
    "big": FeatureSpec("big", "big"),
}


def row(table: str, value: float) -> np.ndarray:
    """The row of a key: its value times 1, 2, 3, …"""
    return value * np.arange(1, TABLES[table].dim + 1, dtype=np.float32)


def _codes(table: str) -> dict[int, np.ndarray]:
    keys: Any = list(ITEMS if table == "item" else USERS) if table != "big" else [1 << 63, 5]
    values = [*ITEMS.values()] if table == "item" else [*USERS.values()] if table == "user" else [9.0, 5.0]
    return dict(zip(as_codes(keys, TABLES[table].key).tolist(), (row(table, v) for v in values), strict=True))


class FakeView:
    """A view of the one version."""

    session = None
    unserved = "install tierstore[dense]"
    version = VERSION
    seq = 0

    def __init__(self, features: dict[str, FeatureSpec], gate: threading.Event) -> None:
        self.features = features
        self._gate = gate
        self._rows = {name: _codes(name) for name in TABLES}

    def table_of(self, feature: str) -> TableSpec:
        return TABLES[self.features[feature].table]

    def begin(
        self,
        feature: str,
        keys: Any,
        *,
        offsets: Any = None,
        weights: Any = None,
        combiner: str | None = None,
        dtype: str = "float32",
        out: Any = None,
    ) -> FakeLookup:
        table = self.table_of(feature)
        codes = as_codes(keys, table.key).tolist()
        return FakeLookup(self._gate, self._rows[table.name], table, codes, offsets, weights, dtype, out)


class FakeLookup:
    """A look-up that waits for the gate, if that is closed when it begins."""

    def __init__(
        self,
        gate: threading.Event,
        rows: dict[int, np.ndarray],
        table: TableSpec,
        codes: list[int],
        offsets: Any,
        weights: Any,
        dtype: str,
        out: Any,
    ) -> None:
        self._gate, self._rows, self._table, self._codes = gate, rows, table, codes
        self._bags, self._dtype, self._out = (offsets, weights), dtype, out
        self.pending = not gate.is_set()
        self.found = np.array([code in rows for code in codes], bool)

    def finish(self) -> Any:
        self._gate.wait(30)
        table, codes = self._table, self._codes
        default = (
            np.zeros(table.dim, np.float32) if isinstance(table.default, str) else np.array(table.default, np.float32)
        )
        rows = np.array([self._rows.get(code, default) for code in codes], np.float32).reshape(len(codes), table.dim)
        offsets, weights = self._bags
        answer = rows if offsets is None else _pooled(rows, offsets, weights)
        if self._out is not None:
            self._out[:] = answer.astype(self._dtype)
        return self._out


def _pooled(rows: np.ndarray, offsets: Any, weights: Any) -> np.ndarray:
    weights = np.ones(len(rows), np.float32) if weights is None else np.asarray(weights).reshape(-1)
    ends = [*offsets[1:], len(rows)] if len(offsets) else []
    pooled = np.zeros((len(offsets), rows.shape[1]), np.float32)
    for i, (start, end) in enumerate(zip(offsets, ends, strict=True)):
        total = weights[start:end].sum()
        if total:
            pooled[i] = (rows[start:end] * weights[start:end, None]).sum(0) / total
    return pooled


class FakeModel:
    """`gate` cleared makes look-ups wait."""

    ready = True

    def __init__(self, name: str, features: dict[str, FeatureSpec]) -> None:
        self.name, self.active_version = name, VERSION
        self.publisher = SimpleNamespace(token=lambda view: None)  # of no use to a compiled reader
        self.gate = threading.Event()
        self.gate.set()
        self._view = FakeView(features, self.gate)
        self.served = SimpleNamespace(versions=(VERSION,), views=(self._view,), active=None, canary=None)

    @contextmanager
    def view(
        self, version: int | str | None = None, route: bytes | str | None = None, head: str = ""
    ) -> Iterator[FakeView]:
        if not self.ready:
            raise NotReady(f"model {self.name!r} has no active version")
        if version not in (None, VERSION, "stable"):
            raise NotFound(f"no version {version}")
        yield self._view


class FakeStore:
    """What the service needs of a store. Set `delta_error` to have deltas refused with it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.observers: list[Any] = []
        self.epochs = Epochs()
        self.placement = SimpleNamespace(ready=True)
        self.lookup_times = LookupTimes()
        self.audit = Audit(settings.data)
        self.delta_error: TierstoreError | None = None
        self._models = {
            "ctr": FakeModel("ctr", FEATURES),
            "one": FakeModel("one", {"item_id": FEATURES["item_id"]}),
            "names": FakeModel("names", {"user": FEATURES["user"]}),
        }

    def publish_words(self) -> None:
        pass

    def end_predictions(self) -> None:
        pass

    def models(self) -> list[str]:
        return sorted(self._models)

    def warming(self) -> None:
        return None

    def throttle(self) -> dict[str, Any]:
        return {"share": 1.0, "work": [], "p99_s": None, "quiet_p99_s": None, "p99_ratio": 1.3}

    def warm_share(self) -> float:
        return 1.0

    def model(self, name: str) -> FakeModel:
        if name not in self._models:
            raise NotFound(f"no model {name!r}")
        return self._models[name]

    def unserved(self) -> list[str]:
        return []

    def apply_delta(self, source: Any, *, model: str | None = None, seq: int | None = None) -> DeltaResult:
        if self.delta_error is not None:
            raise self.delta_error
        return DeltaResult(model or "", len(pa.py_buffer(source)), True)

    def activate(self, model: str, version: int, *, force: bool = False, expected_active: int | None = None) -> None:
        raise Conflict("stale")

    def status(self, model: str | None = None) -> dict[str, Any]:
        def document(name: str) -> dict[str, Any]:
            versions = [{"version": VERSION, "state": "active", "watermark": 0}]
            return {
                "model": name,
                "active_version": VERSION,
                "watermark": 0,
                "versions": versions,
                "tables": {},
                "log": {"entries": 0},
            }

        budget = {"used": 0, "total": 1 << 20}
        return {
            "models": {name: document(name) for name in ([model] if model else self.models())},
            "problems": [],
            "disk": {"free": 1 << 30, "reserve": 1 << 20, "problem": None},
            "host_budget": budget,
            "overlay_budget": budget,
        }
