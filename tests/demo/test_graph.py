"""The demo's dense part as a graph: it scores as the trainer does, and is left out where nothing could serve it."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from tierstore.demo import export
from tierstore.demo.clicklog import CONTEXT
from tierstore.demo.trainer import DIM, Dense
from tierstore.formats.delta import read_delta
from tierstore.formats.snapshot import open_snapshot

DRAW = np.random.default_rng(3)
DENSE = Dense(DRAW.standard_normal(1 + CONTEXT + DIM).astype(np.float32))
ROWS = np.zeros((3, DIM), np.float32)


def write(directory: Path) -> Path | None:
    export.write_snapshot(
        directory, version=1, delta_seq=0, users=ROWS, items=np.arange(3), item_vectors=ROWS, dense=DENSE
    )
    return open_snapshot(directory).dense_path()


def delta() -> bytes | None:
    some = {"users": np.arange(3), "user_vectors": ROWS, "items": np.arange(3), "item_vectors": ROWS}
    return read_delta(
        export.delta(seq=1, event_time=datetime.now(UTC), gone=np.empty(0, np.int32), dense=DENSE, **some)
    ).dense


def test_the_graph_scores_as_the_trainer(tmp_path: Path) -> None:
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra `dense`")
    path = write(tmp_path)
    assert path is not None
    assert path.read_bytes() == delta()
    user, item, bag = (DRAW.standard_normal((5, DIM)).astype(np.float32) for _ in range(3))
    context = DRAW.standard_normal((5, CONTEXT)).astype(np.float32)
    feed = {export.USER: user, export.ITEM: item, export.CLICKED: bag, "context": context}
    (logit,) = runtime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"]).run(None, feed)
    np.testing.assert_allclose(logit[:, 0], DENSE.score(user, item, bag, context), rtol=1e-4, atol=1e-4)


def test_without_the_extra_rows_are_sent_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "can_predict", lambda: False)
    assert write(tmp_path) is None
    assert delta() is None
