"""The device tier beside what there is: `python -m benchmarks.device_lookup [--tiny] [--json FILE]`, or `make bench-gpu`.

    resident  every key is on the device; keys and answer are there too. Against `cupy.take`, which is told where the
              rows are in one plain array
    keys      every key is on the device, keys come from CPU memory, 64 of them and up to a batch. Against `cupy.take`, whose
              index is copied up
    tiered    a tenth of the rows is on the device, all are in the host tier, which the device reads; Zipf 1.05, keys from
              CPU memory, answer on the device. Against the host tier alone, whose whole answer is copied up; with bytes
              moved beside what the bus moves at best
    filled    rows that come to an empty table. Against copies over the bus
    threads   8 of them look up 4,096 keys each. Against one
    pooled    bags of 20 keys, all on the device. Against `torch.nn.EmbeddingBag`, where torch is there and sees the GPU

The two of a pair alternate in short rounds; the median of the rounds' ratios is what counts. Without a GPU it says so
and ends well.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.machine import describe
from benchmarks.options import parser_of
from tierstore.kernels.pool import check_offsets
from tierstore.tiers.device.backend import NO_HOST, TEAM, Backend
from tierstore.tiers.device.cupy_device import CudaDevice, find_devices
from tierstore.tiers.device.lookup import Pooling, look_up, to_device
from tierstore.tiers.device.table import DeviceTable
from tierstore.tiers.device.workspaces import DeviceMemory
from tierstore.tiers.host.table import HostTable
from tierstore.types import Combiner, KeyType, StorageDtype, TableSpec, Tier

BAG, THREADS = 20, 8
Result = dict[str, Any]


def spec_of(dim: int) -> TableSpec:
    return TableSpec("t", KeyType.INT64, dim, StorageDtype.FLOAT32)


class Scene:
    """`rows` random keys whose vectors tell them, and tables that hold them."""

    def __init__(self, backend: Backend, rows: int, dim: int, on_device: int) -> None:
        self.backend, self.spec = backend, spec_of(dim)
        self.keys = np.unique(np.random.default_rng(1).integers(-(1 << 63), (1 << 63) - 1, rows))
        np.random.default_rng(2).shuffle(self.keys)
        self.vectors = np.repeat((self.keys >> 40).astype(np.float32)[:, None], dim, 1)
        row = dim * 4 + 11
        self.memory = DeviceMemory(backend, int(on_device * row * 1.4) + (80 << 20))
        nothing = np.zeros(dim, np.float32)
        self.table = DeviceTable(self.spec, int(on_device * row * 1.4), self.memory, default_vector=nothing)
        self.table.warm(self.keys[:on_device], self.vectors[:on_device].view(np.uint8))
        self.host = HostTable(self.spec, int(rows * (dim * 4 + 16) * 1.4) + (1 << 20), default_vector=nothing)
        self.host.warm(self.keys, self.vectors.view(np.uint8))

    def fetch(self, keys: np.ndarray, dtype: Any) -> tuple[Any, np.ndarray]:
        rows, state = np.empty((len(keys), self.spec.dim), dtype), np.zeros(len(keys), np.uint8)
        self.host.lookup(keys, rows, state)
        return rows, state

    def resident(self) -> np.ndarray:
        """Positions of keys that are on the device."""
        held = np.sort(self.table.hot_keys(len(self.keys)))
        return np.flatnonzero(np.isin(self.keys, held, assume_unique=True))

    def close(self) -> None:
        self.host.close()
        self.table.close()
        self.memory.close()


def alternate(
    backend: Backend, rounds: int, calls: int, ours: Callable[[int], Any], theirs: Callable[[int], Any]
) -> dict[str, float]:
    """Medians: seconds a call of each, and of the rounds' ratios of speed, ours over theirs."""
    times: list[tuple[float, float]] = []
    for each in range(rounds + 1):
        spent = []
        for work in (ours, theirs):
            backend.synchronize()
            began = time.perf_counter()
            for call in range(calls):
                work(call)
            backend.synchronize()
            spent.append((time.perf_counter() - began) / calls)
        if each:  # the first compiles and fills caches
            times.append((spent[0], spent[1]))
    mine, other = zip(*times, strict=True)
    return {
        "ours_s": statistics.median(mine),
        "theirs_s": statistics.median(other),
        "ratio": statistics.median(b / a for a, b in times),
    }


def resident(backend: Backend, xp: Any, rows: int, dim: int, batch: int, rounds: int, calls: int) -> Result:
    scene = Scene(backend, rows, dim, rows)
    there = scene.resident()
    rng = np.random.default_rng(3)
    places = [there[rng.integers(0, len(there), batch)] for _ in range(calls)]
    keys = [to_device(scene.memory, scene.keys[at]) for at in places]
    indices = [to_device(scene.memory, at) for at in places]
    vectors = to_device(scene.memory, scene.vectors)
    state, done = backend.empty((batch,), np.uint8), backend.empty((2,), np.uint32)
    mine, other = (backend.empty((batch, dim), np.float32) for _ in range(2))
    n, none = batch, 0
    state_at, done_at, out_at = (backend.address_of(array) for array in (state, done, mine))

    def ours(call: int) -> None:
        with scene.table.reading() as view:
            assert view is not None
            keys_at = backend.address_of(keys[call])
            view.stream.launch(
                "look_up", -(-batch // 2) * TEAM, view.table, NO_HOST, keys_at, none, state_at, n, none, none, none,
                out_at, 0, view.counters, done_at,
            )  # fmt: skip

    def take(call: int) -> None:
        xp.take(vectors, indices[call], axis=0, out=other)

    ours(0)
    take(0)
    backend.synchronize()
    assert bool((mine == other).all()), "both must answer the same"
    got = alternate(backend, rounds, calls, ours, take)
    scene.close()
    return {
        "part": "resident", "rows": rows, "dim": dim, "batch": batch, "against": "cupy.take",
        "keys_per_s": batch / got["ours_s"], "theirs_keys_per_s": batch / got["theirs_s"], "ratio": got["ratio"],
    }  # fmt: skip


def from_cpu_memory(backend: Backend, xp: Any, rows: int, dim: int, batch: int, rounds: int, calls: int) -> Result:
    scene, rng = Scene(backend, rows, dim, rows), np.random.default_rng(3)
    there, out = scene.resident(), backend.empty((batch, dim), np.float32)
    places = [there[rng.integers(0, len(there), batch)] for _ in range(calls)]
    vectors, given = to_device(scene.memory, scene.vectors), np.empty((0, dim), np.float32)

    def ours(call: int) -> None:
        assert look_up(scene.table, scene.keys[places[call]], np.zeros(batch, np.uint8), given, out, scene.fetch)

    def take(call: int) -> None:
        xp.take(vectors, xp.asarray(places[call]), axis=0, out=out)
        backend.synchronize()

    got = alternate(backend, rounds, calls, ours, take)
    scene.close()
    return {
        "part": "keys", "rows": rows, "dim": dim, "batch": batch, "against": "cupy.take, index copied up",
        "us": got["ours_s"] * 1e6, "theirs_us": got["theirs_s"] * 1e6, "ratio": got["ratio"],
        "keys_per_s": batch / got["ours_s"], "theirs_keys_per_s": batch / got["theirs_s"],
    }  # fmt: skip


def filled(backend: Backend, rows: int, dim: int, rounds: int) -> Result:
    spent, scene = [], Scene(backend, rows, dim, rows)
    for _ in range(rounds):
        scene.table.close()
        scene.table = DeviceTable(scene.spec, scene.table.budget_bytes, scene.memory, default_vector=np.zeros(dim))
        began = time.perf_counter()
        scene.table.warm(scene.keys, scene.vectors.view(np.uint8))
        spent.append(time.perf_counter() - began)
    rate, bus = rows / statistics.median(spent), bus_bytes_a_second(scene.memory)
    scene.close()
    return {
        "part": "filled", "rows": rows, "dim": dim, "batch": rows, "against": "copies over the bus", "keys_per_s": rate,
        "theirs_keys_per_s": bus / (dim * 4 + 8), "ratio": rate * (dim * 4 + 8) / bus,
    }  # fmt: skip


def threads(backend: Backend, rows: int, dim: int, batch: int, rounds: int, calls: int) -> Result:
    scene, rng = Scene(backend, rows, dim, rows), np.random.default_rng(6)
    there, given = scene.resident(), np.empty((0, dim), np.float32)
    keys = [scene.keys[there[rng.integers(0, len(there), batch)]] for _ in range(THREADS)]
    outs = [backend.empty((batch, dim), np.float32) for _ in range(THREADS)]

    def work(number: int) -> None:
        for _ in range(calls):
            assert look_up(scene.table, keys[number], np.zeros(batch, np.uint8), given, outs[number], scene.fetch)

    def together(count: int) -> Callable[[int], None]:
        def run(call: int) -> None:
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(work, range(count)))

        return run

    got = alternate(backend, rounds, 1, together(THREADS), together(1))
    scene.close()
    many, one = THREADS * calls * batch / got["ours_s"], calls * batch / got["theirs_s"]
    return {
        "part": "threads", "rows": rows, "dim": dim, "batch": batch, "against": f"one thread, {THREADS} here",
        "keys_per_s": many, "theirs_keys_per_s": one, "ratio": many / one,
    }  # fmt: skip


def zipf(rows: int, batch: int, calls: int) -> Iterator[np.ndarray]:
    """Positions, 0 the most frequent, with frequency 1 / rank^1.05."""
    cumulative = np.cumsum(1 / np.arange(1, rows + 1) ** 1.05)
    rng = np.random.default_rng(4)
    for _ in range(calls):
        yield np.searchsorted(cumulative, rng.random(batch) * cumulative[-1])


def tiered(backend: Backend, rows: int, dim: int, batch: int, rounds: int, calls: int) -> Result:
    scene = Scene(backend, rows, dim, rows // 10)
    scene.table.read_below(scene.host)
    asked = [scene.keys[at] for at in zipf(len(scene.keys), batch, calls)]
    out = backend.empty((batch, dim), np.float32)
    given = np.empty((0, dim), np.float32)
    states: list[np.ndarray] = []

    def ours(call: int) -> None:
        state = np.zeros(batch, np.uint8)
        assert look_up(scene.table, asked[call], state, given, out, scene.fetch, host=scene.host)
        states.append(state)

    def host_alone(call: int) -> None:
        to_device(scene.memory, scene.fetch(asked[call], np.float32)[0])

    got = alternate(backend, rounds, calls, ours, host_alone)
    hit = float(np.mean([(state == Tier.DEVICE).mean() for state in states]))
    missed = np.mean(
        [len(np.unique(keys[state != Tier.DEVICE])) for keys, state in zip(asked * (rounds + 1), states, strict=True)]
    )
    up = batch * 9 + missed * (dim * 4 + 1)
    bus, stats = bus_bytes_a_second(scene.memory), scene.table.stats()
    scene.close()
    return {
        "part": "tiered", "rows": rows, "dim": dim, "batch": batch, "against": "host tier, answer copied up",
        "keys_per_s": batch / got["ours_s"], "theirs_keys_per_s": batch / got["theirs_s"], "ratio": got["ratio"],
        "device_hits": hit, "bytes_up_a_key": up / batch, "bus_gb_s": bus / 1e9,
        "host_tier_read_by": "the device" if (why := stats["host_problem"]) is None else f"the CPU: {why}",
        "share_of_bus": up / got["ours_s"] / bus, "answer_over_bus": batch * dim * 4 / got["ours_s"] / bus,
    }  # fmt: skip


def bus_bytes_a_second(memory: DeviceMemory) -> float:
    """What one stream of copies from page-locked memory reaches."""
    with memory.workspace() as ws:
        best = 0.0
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(8):
                ws.stream.upload(ws.at(0), ws.staging(0, ws.nbytes))
            ws.stream.synchronize()
            best = max(best, 8 * ws.nbytes / (time.perf_counter() - began))
    return best


def pooled(backend: Backend, torch: Any, rows: int, dim: int, bags: int, rounds: int, calls: int) -> Result:
    scene = Scene(backend, rows, dim, rows)
    there = scene.resident()
    rng = np.random.default_rng(5)
    places = [there[rng.integers(0, len(there), bags * BAG)] for _ in range(calls)]
    offsets = check_offsets(np.arange(0, bags * BAG, BAG), bags * BAG)
    given, out = np.empty((0, dim), np.float32), backend.empty((bags, dim), np.float32)
    module = torch.nn.EmbeddingBag.from_pretrained(torch.from_numpy(scene.vectors).cuda(), mode="sum")
    starts = torch.from_numpy(offsets).cuda()

    def ours(call: int) -> None:
        state = np.zeros(bags * BAG, np.uint8)
        assert look_up(
            scene.table, scene.keys[places[call]], state, given, out, scene.fetch, Pooling(offsets, None, Combiner.SUM)
        )

    def embedding_bag(call: int) -> None:
        module(torch.from_numpy(places[call]).cuda(), starts)
        torch.cuda.synchronize()

    got = alternate(backend, rounds, calls, ours, embedding_bag)
    scene.close()
    return {
        "part": "pooled", "rows": rows, "dim": dim, "batch": bags * BAG, "against": "torch.nn.EmbeddingBag, keys from CPU memory",
        "keys_per_s": bags * BAG / got["ours_s"], "theirs_keys_per_s": bags * BAG / got["theirs_s"], "ratio": got["ratio"],
    }  # fmt: skip


def measure(backend: Backend, xp: Any, torch: Any, *, rows: int, batch: int, rounds: int, calls: int) -> list[Result]:
    results = [resident(backend, xp, rows, dim, batch, rounds, calls) for dim in (32, 64)]
    sizes = sorted({min(size, batch) for size in (64, 1024, 4096, batch)})
    results += [from_cpu_memory(backend, xp, rows, 64, size, rounds, calls) for size in sizes]
    results += [tiered(backend, rows, dim, batch, rounds, calls) for dim in (32, 64)]
    results.append(filled(backend, rows, 64, rounds))
    results.append(threads(backend, rows, 64, min(4096, batch), rounds, calls))
    if torch is not None:
        results.append(pooled(backend, torch, rows, 64, max(1, batch // BAG), rounds, calls))
    return results


def main() -> None:
    options = parser_of(__file__, __doc__, "tiny").parse_args()
    document: dict[str, Any] = {"benchmark": "device_lookup", "machine": describe(), "results": [], "skipped": []}
    count, why = find_devices()
    torch = import_module("torch") if count and importlib.util.find_spec("torch") else None
    if torch is not None and not torch.cuda.is_available():
        torch = None
    if not count:
        document["skipped"].append(f"nothing was measured: {why}")
    else:
        size = (
            {"rows": 20_000, "batch": 2048, "rounds": 2, "calls": 4}
            if options.tiny
            else {"rows": 1_000_000, "batch": 65_536, "rounds": 21, "calls": 16}
        )
        document["results"] = measure(CudaDevice(0), import_module("cupy"), torch, **size)
        if torch is None:
            document["skipped"].append("pooled: torch is not installed, or sees no GPU")
    report.write(options.json, document)
    print(report.markdown(document))


if __name__ == "__main__":
    main()
