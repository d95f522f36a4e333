"""A way to make sessions under any settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tierstore.config import load_settings
from tierstore.predict import sandbox
from tierstore.predict.runtime import Runtime
from tierstore.predict.session import DenseCounts, DenseSession
from tierstore.types import Combiner, FeatureSpec, KeyType, StorageDtype, TableSpec

TABLES = {
    "user": TableSpec("user", KeyType.INT64, 4, StorageDtype.FLOAT32),
    "item": TableSpec("item", KeyType.INT64, 8, StorageDtype.FLOAT16),
    "bias": TableSpec("bias", KeyType.INT64, 1, StorageDtype.FLOAT32),
}
FEATURES = {
    "user_id": FeatureSpec("user_id", "user"),
    "item_id": FeatureSpec("item_id", "item"),
    "clicked": FeatureSpec("clicked", "item", Combiner.MEAN),
    "bias_id": FeatureSpec("bias_id", "bias"),
}


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are not tried in a process of their own."""
    monkeypatch.setattr(sandbox, "try_graph", lambda *_: None)


@pytest.fixture
def load(untried: None) -> Callable[..., DenseSession]:
    """A session of ONNX bytes over the features above, not tried before; settings by keyword."""

    def make(
        model: bytes,
        counts: DenseCounts | None = None,
        may_go_on: Callable[[], None] = lambda: None,
        **settings: Any,
    ) -> DenseSession:
        runtime = Runtime(load_settings(None, **settings))
        return runtime.load(model, FEATURES, TABLES, counts or DenseCounts(), may_go_on=may_go_on)

    return make
