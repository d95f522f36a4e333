"""What only a GPU can show: other libraries take an answer, ONNX Runtime runs there.

Skipped without one. Each of these has a fellow over a stand-in elsewhere; here the driver, CuPy, ONNX Runtime and PyTorch
are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine import scenes
from tests.hashed_keys import FEATURES, vectors, write_hashed
from tests.predict import onnx_models as om
from tests.tiers.devices import ON_GPU
from tierstore.engine.store import Store
from tierstore.errors import MissingExtra, NotReady

pytestmark = ON_GPU
ITEMS = np.arange(500, dtype=np.int64)


@pytest.fixture
def store(open_store: Callable[..., Store], tmp_path: Path) -> Store:
    store = open_store(device_budget="64MiB")
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    return store


def test_an_answer_is_an_array_that_others_take_without_a_copy(store: Store) -> None:
    cupy = pytest.importorskip("cupy")
    rows = store.model("ctr").lookup("item_id", ITEMS, device="gpu")
    np.testing.assert_array_equal(rows.get(), scenes.vectors("item", 0, ITEMS))
    assert rows.__cuda_array_interface__["data"][0] == rows.data.ptr
    again = cupy.from_dlpack(rows)
    assert again.data.ptr == rows.data.ptr


def test_pytorch_reads_an_answer_in_a_stream_of_its_own(store: Store) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    with torch.cuda.stream(torch.cuda.Stream()):
        rows = torch.from_dlpack(store.model("ctr").lookup("item_id", ITEMS, device="gpu"))
        total = (rows * 2).sum().item()
    np.testing.assert_allclose(total, 2 * scenes.vectors("item", 0, ITEMS).sum(), rtol=1e-4)


def test_keys_that_a_stream_makes_on_the_gpu_are_answered_there(store: Store) -> None:
    cupy = pytest.importorskip("cupy")
    ctr, wanted = store.model("ctr"), scenes.vectors("item", 0, ITEMS)
    for _ in range(3):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            keys = cupy.arange(len(ITEMS))[::-1] + 0
        for given in (stream, stream.ptr):
            rows = ctr.lookup("item_id", keys, stream=given)
            with stream:
                np.testing.assert_array_equal(rows.get(), wanted[::-1])
        assert isinstance(ctr.lookup("item_id", keys, stream=stream, device="cpu"), np.ndarray)
        bags = ctr.lookup_bags("clicked", keys, cupy.arange(0, 500, 5), stream=stream)
        with stream:
            got = bags.get()
        np.testing.assert_array_equal(got, ctr.lookup_bags("clicked", ITEMS[::-1], np.arange(0, 500, 5)))


def test_keys_of_every_type_are_answered_beside_deltas_that_are_not_folded(store: Store) -> None:
    cupy = pytest.importorskip("cupy")
    ctr, wanted = store.model("ctr"), scenes.vectors("item", 0, ITEMS)
    stream, offsets = cupy.cuda.Stream(non_blocking=True), np.arange(0, 500, 5)
    with ctr.view():  # so nothing is folded
        for seq in range(1, 4):
            for kind in "int64", "int32", "uint16":
                with stream:
                    keys, starts = cupy.arange(len(ITEMS), dtype=kind), cupy.asarray(offsets, np.int32)
                rows = ctr.lookup("item_id", keys, stream=stream)
                bags = ctr.lookup_bags("clicked", keys, starts, stream=stream)
                with stream:
                    got, pooled = rows.get(), bags.get()
                np.testing.assert_array_equal(got, wanted)
                np.testing.assert_array_equal(pooled, ctr.lookup_bags("clicked", ITEMS, offsets))
            changed = ITEMS[seq::7]
            store.apply_delta(scenes.stamped(seq, {"item": changed}))
            wanted[changed] = scenes.vectors("item", seq, changed)


def test_keys_are_hashed_on_the_gpu(open_store: Callable[..., Store], tmp_path: Path) -> None:
    cupy = pytest.importorskip("cupy")
    store = open_store(device_budget="64MiB")
    store.load_snapshot(write_hashed(tmp_path))
    ctr, stream = store.model("ctr"), cupy.cuda.Stream(non_blocking=True)
    for feature in "by_seed", "by_rest", "unsigned":
        _, given, wanted = FEATURES[feature]
        with stream:
            keys = cupy.asarray(given)
        rows = ctr.lookup(feature, keys, stream=stream)
        with stream:
            np.testing.assert_array_equal(rows.get(), vectors(wanted))


def test_look_ups_in_a_stream_follow_each_other_without_a_wait(store: Store) -> None:
    """From the disk, from the host tier, on the device; more than there are workspaces, while the stream has other work."""
    cupy = pytest.importorskip("cupy")
    ctr, stream = store.model("ctr"), cupy.cuda.Stream(non_blocking=True)
    assert store.status()["device"]["answers_in_streams"]
    for turn in range(3):
        answers = []
        with stream:
            busy = cupy.ones((2048, 2048), cupy.float32)
            for _ in range(4):
                busy = busy @ busy * 1e-4
            for number in range(40):
                keys = np.roll(ITEMS, number + turn)
                answers.append((ctr.lookup("item_id", keys, stream=stream), keys.copy()))
                keys[:] = -1
            for rows, keys in answers:
                np.testing.assert_array_equal(rows.get(), scenes.vectors("item", 0, keys))
    assert store.status()["models"]["ctr"]["tables"]["item"]["device"]["problem"] is None


def test_a_look_up_within_a_capture_is_refused_and_leaves_the_device_in_use(store: Store) -> None:
    cupy = pytest.importorskip("cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(NotReady, match="captured"):
            store.model("ctr").lookup("item_id", ITEMS, device="gpu")
        stream.end_capture()
    rows = store.model("ctr").lookup("item_id", ITEMS, device="gpu")
    np.testing.assert_array_equal(rows.get(), scenes.vectors("item", 0, ITEMS))
    assert store.status()["models"]["ctr"]["tables"]["item"]["device"]["problem"] is None


def test_a_dense_part_runs_on_rows_that_never_left_the_gpu(open_store: Callable[..., Store], tmp_path: Path) -> None:
    weights = {"user_id": np.linspace(-1, 1, 4), "item_id": np.linspace(0, 2, 8), "hour": np.ones(3)}
    try:
        store: Any = open_store(device_budget="64MiB", dense_provider="cuda")
    except MissingExtra as error:
        pytest.skip(str(error))
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=om.linear(weights, 1.0)))
    ctr = store.model("ctr")
    hour = np.ones((len(ITEMS), 3), np.float32)
    for _ in range(3):  # the second time most rows are there
        scores = ctr.predict({"user_id": ITEMS, "item_id": ITEMS, "hour": hour})[:, 0]
        expected = sum(ctr.lookup(name, ITEMS) @ weights[name] for name in ("user_id", "item_id")) + 3 + 1
        np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)
