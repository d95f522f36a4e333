"""The demo's dense part as a graph: it scores as the trainer does, and is left out where nothing could serve it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tierstore.demo import shop
from tierstore.demo.clicklog import CONTEXT, WorldSize
from tierstore.demo.graph import CLICKED, ITEM, USER, graph
from tierstore.demo.trainer import DIM, Dense
from tierstore.formats.delta.reader import read_delta
from tierstore.formats.snapshot.reader import open_snapshot


@pytest.fixture(scope="module")
def small() -> shop.Shop:
    made = shop.Shop(WorldSize(users=50, items=50, slot_events=100, day_slots=2, minutes=2, newest_events=10), 3)
    made.learn_day()
    return made


def test_the_graph_scores_as_the_trainer() -> None:
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra `dense`")
    draw = np.random.default_rng(3)
    dense = Dense(draw.standard_normal(1 + CONTEXT + DIM).astype(np.float32))
    user, item, bag = (draw.standard_normal((5, DIM)).astype(np.float32) for _ in range(3))
    context = draw.standard_normal((5, CONTEXT)).astype(np.float32)
    feed = {USER: user, ITEM: item, CLICKED: bag, "context": context}
    (logit,) = runtime.InferenceSession(graph(dense), providers=["CPUExecutionProvider"]).run(None, feed)
    np.testing.assert_allclose(logit[:, 0], dense.score(user, item, bag, context), rtol=1e-4, atol=1e-4)


def test_snapshots_and_deltas_carry_the_graph(small: shop.Shop, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra `dense`")
    small.write_snapshot(tmp_path, 1)
    path = open_snapshot(tmp_path).dense_path()
    assert path is not None
    assert path.read_bytes() == graph(small.trainer.dense)
    assert read_delta(small.next_delta().payload).dense == {"": graph(small.trainer.dense)}


def test_without_the_extra_rows_are_sent_alone(
    small: shop.Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shop, "can_predict", lambda: False)
    small.write_snapshot(tmp_path, 1)
    assert open_snapshot(tmp_path).dense_path() is None
    assert read_delta(small.next_delta().payload).dense == {}
