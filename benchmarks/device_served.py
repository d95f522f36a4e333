"""The parts `module` and `predicted` of `device_lookup.py`: a store whose rows are all on the GPU, asked as programs ask it."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from benchmarks import networks
from tierstore.config import load_settings

DIM, BAG = networks.DIM, 16
Result = dict[str, Any]


def _median(work: Callable[[Any], Any], rounds: int, inputs: Sequence[Any]) -> float:
    """Seconds a call."""
    spent = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        for each in inputs:
            work(each)
        spent.append((time.perf_counter() - began) / len(inputs))
    return statistics.median(spent[1:])  # the first fills caches


def _written(folder: Path, rows: int, network: bytes | None) -> Path:
    with tierstore.SnapshotWriter(folder, model="ranker", version=1) as writer:
        table = writer.table("item", dim=DIM)
        keys = np.arange(rows, dtype=np.int64)
        table.write(keys, np.random.default_rng(1).standard_normal((rows, DIM)).astype(np.float32))
        writer.warmup("item", keys)
        for feature in networks.FEATURES:
            writer.feature(feature, table="item", combiner="mean")
        if network is not None:
            writer.dense(network)
    return folder


def _open(folder: Path, snapshot: Path, **options: Any) -> Any:
    """A store whose rows are all on the device."""
    store = tierstore.Store(load_settings(data=folder, device_budget="2GiB", host_budget="1GiB", **options))
    store.load_snapshot(snapshot)
    return store


def module(torch: Any, rows: int, rounds: int, calls: int) -> list[Result]:
    from tierstore.torch import Embedding, EmbeddingBag

    results, rng = [], np.random.default_rng(2)
    with tempfile.TemporaryDirectory() as work:
        store = _open(Path(work) / "data", _written(Path(work) / "snapshot", rows, None))
        model = store.model("ranker")
        embedding, bag = Embedding(model, "f00").eval(), EmbeddingBag(model, "f00", mode="sum").eval()

        def of(read: Any) -> Callable[[Any], None]:
            def ours(inputs: Any) -> None:
                read(*inputs)
                torch.cuda.synchronize()

            return ours

        for batch in 64, 4096, 65_536:
            keys, starts = [rng.integers(0, rows, batch) for _ in range(calls)], np.arange(0, batch, BAG)
            there, starts_there = [torch.from_numpy(each).cuda() for each in keys], torch.from_numpy(starts).cuda()
            ways = {
                "Model.lookup, keys in CPU memory": (
                    of(embedding), [(each,) for each in there],
                    lambda keys: model.lookup("f00", keys, device="gpu"),
                ),
                "Model.lookup_bags, keys and offsets in CPU memory": (
                    of(bag), [(each, starts_there) for each in there],
                    lambda keys, starts=starts: model.lookup_bags("f00", keys, starts, combiner="sum", device="gpu"),
                ),
            }  # fmt: skip
            for against, (ours, inputs, theirs) in ways.items():
                with torch.inference_mode():
                    mine = _median(ours, rounds, inputs)
                other = _median(theirs, rounds, keys)
                results.append(
                    {
                        "part": "module", "rows": rows, "dim": DIM, "batch": batch, "against": against,
                        "us": mine * 1e6, "theirs_us": other * 1e6, "ratio": other / mine,
                    }
                )  # fmt: skip
        store.close()
    return results


def predicted(rows: int, rounds: int, calls: int) -> list[Result]:
    results, rng = [], np.random.default_rng(3)
    with tempfile.TemporaryDirectory() as work:
        snapshot = _written(Path(work) / "snapshot", rows, networks.hidden_layer(networks.FEATURES))
        store = _open(Path(work) / "data", snapshot, dense_provider="cuda")
        model = store.model("ranker")
        for items in 128, 4096:
            offsets = np.arange(0, items * BAG, BAG)
            inputs = [
                {feature: (rng.integers(0, rows, items * BAG), offsets) for feature in networks.FEATURES}
                for _ in range(calls)
            ]
            spent = _median(model.predict, rounds, inputs)
            results.append(
                {"part": "predicted", "rows": rows, "dim": DIM, "batch": items, "against": "", "us": spent * 1e6}
            )
        store.close()
    return results
