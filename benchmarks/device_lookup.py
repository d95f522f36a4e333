"""The device tier beside what there is: `python -m benchmarks.device_lookup [--tiny] [--parts …] [--hkv HEADERS]
[--json FILE]`, or `make bench-gpu`.

    resident  every key is on the device; keys and answer are there too. Against `cupy.take`, which is told where the
              rows are in one plain array; and, with `--hkv` and nvcc, against HierarchicalKV's `find`
    keys      every key is on the device, keys come from CPU memory, 64 of them and up to a batch. Against PyTorch's
              `tensor[index]`, or `cupy.take` without PyTorch, whose index is copied up
    beside    the same, while another thread promotes 4,096 rows after 4,096 others. Against the same alone
    tenth     a tenth of the keys are in the host tier, which the device reads. Against all on the device
    tiered    a tenth of the rows is on the device, all are in the host tier, which the device reads; Zipf 1.05, keys from
              CPU memory, answer on the device. Against the host tier alone, whose whole answer is copied up; with bytes
              moved beside what the bus moves at best
    filled    rows that come to an empty table. Against copies over the bus
    threads   8 of them look up 4,096 keys each. Against one
    streamed  26 look-ups in the caller's stream, as of a model with so many tables, which is waited for at the end.
              Against the same, where each is waited for
    changed   the same in the stream, with keys on the GPU, while a delta of a hundredth of the rows is not folded. Against
              the same without the delta
    together  8 look-ups that are on the device at once, as of a prediction with so many features. Against one after the
              other
    pooled    bags of 32, 16 and 20 keys, all on the device. Against `torch.nn.EmbeddingBag`
    module    `tierstore.torch.Embedding`, and `EmbeddingBag` of 16, with keys and offsets on the GPU. Against look-ups with both in CPU memory
    predicted a dense part on the GPU over bags of 16, rows on the device (`dense_provider = "cuda"`)

The two of a pair alternate in short rounds; the median of the rounds' ratios is what counts. The file has each part as
soon as it is measured. Without a GPU it says so and ends well; parts that want PyTorch or ONNX Runtime for a GPU are left out where these are not installed.
"""

from __future__ import annotations

import importlib.util
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import device_served, hierarchical_kv, report
from benchmarks.hierarchical_kv import HierarchicalKV
from benchmarks.machine import describe
from benchmarks.options import parser_of
from tierstore.engine.data.overlay import OverlayTable
from tierstore.errors import TierstoreError
from tierstore.kernels.pool import check_offsets
from tierstore.tiers.device.backend import NO_HOST, TEAM, Backend
from tierstore.tiers.device.cupy_device import CudaDevice, find_devices
from tierstore.tiers.device.lookup import LookUp, OtherTiers, PendingLookup, Pooling, to_device
from tierstore.tiers.device.table import DeviceTable
from tierstore.tiers.device.workspaces import ANSWERING, DeviceMemory
from tierstore.tiers.host.table import HostTable
from tierstore.types import Combiner, GpuArray, KeyType, StorageDtype, TableSpec, Tier

THREADS, TABLES = 8, 26
WORKSPACE_ROOM = 6 << 30  # of a budget, for workspaces of the size that they have at most
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
        self.memory = DeviceMemory(
            backend, int(on_device * row * 1.4) + (WORKSPACE_ROOM if rows > 1 << 16 else 80 << 20)
        )
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


def resident(
    backend: Backend, xp: Any, rows: int, dim: int, batch: int, rounds: int, calls: int, hkv: Any = None
) -> Result:
    """`hkv`: the library of HierarchicalKV, for that in place of `cupy.take`."""
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
        assert scene.table.memory is not None
        with scene.table.memory.launching() as view:
            keys_at = backend.address_of(keys[call])
            view.stream.launch(
                "look_up", -(-batch // 2) * TEAM, view.table, NO_HOST, keys_at, none, state_at, n, none, none, none, none, none, none, none,
                out_at, 0, view.counters, done_at,
            )  # fmt: skip

    def take(call: int) -> None:
        xp.take(vectors, indices[call], axis=0, out=other)

    peer: HierarchicalKV | None = None
    if hkv is not None:
        peer, every = HierarchicalKV(hkv, rows, dim), to_device(scene.memory, scene.keys)
        peer.insert(len(scene.keys), backend.address_of(every), backend.address_of(vectors))

    def find(call: int) -> None:
        assert peer is not None
        peer.find(batch, backend.address_of(keys[call]), backend.address_of(other), state_at)

    theirs = take if peer is None else find
    ours(0)
    theirs(0)
    backend.synchronize()
    assert bool((mine == other).all()), "both must answer the same"
    got = alternate(backend, rounds, calls, ours, theirs)
    if peer is not None:
        peer.close()
    scene.close()
    return {
        "part": "resident", "rows": rows, "dim": dim, "batch": batch,
        "against": "cupy.take" if peer is None else "HierarchicalKV's find",
        "keys_per_s": batch / got["ours_s"], "theirs_keys_per_s": batch / got["theirs_s"], "ratio": got["ratio"],
    }  # fmt: skip


class Asking:
    """Look-ups of `batch` keys whose rows are on the device, but for one in `below`, if any, which is in the host tier alone.

    `there`: the keys are in the device's memory. `delta`: rows that are not folded.
    """

    def __init__(
        self,
        scene: Scene,
        batch: int,
        calls: int,
        below: int = 0,
        *,
        there: bool = False,
        delta: OverlayTable | None = None,
    ) -> None:
        self.scene, rng = scene, np.random.default_rng(3)
        held = scene.resident()
        self.places = [held[rng.integers(0, len(held), batch)] for _ in range(calls)]
        if below:
            elsewhere = np.setdiff1d(np.arange(len(scene.keys)), held, assume_unique=True)
            for places in self.places:
                places[rng.permutation(batch)[: -(-batch // below)]] = rng.choice(elsewhere, -(-batch // below))
        self.keys: list[Any] = [scene.keys[places] for places in self.places]
        if there:
            self.keys = [GpuArray.of(scene.backend, to_device(scene.memory, keys)) for keys in self.keys]
        self._delta = delta
        self._overlays = np.array([] if delta is None else [delta.words.ctypes.data], np.int64)
        self._filters = 0 if delta is None else delta.filter_bytes
        self.out = scene.backend.empty((batch, scene.spec.dim), np.float32)
        self.state = np.zeros(batch, np.uint8)

    def look_up(self, call: int) -> LookUp:
        self.state[:] = 0
        scene, keys = self.scene, self.keys[call]
        tiers = OtherTiers(scene.fetch, scene.host, self._overlays, self._filters)
        return LookUp(scene.table, keys, self.state, GpuArray.of(scene.backend, self.out), tiers)

    def __call__(self, call: int, pending_lookup: PendingLookup | None = None) -> None:
        assert self.look_up(call).finish(pending_lookup)


def from_cpu_memory(
    backend: Backend, xp: Any, torch: Any, rows: int, dim: int, batch: int, rounds: int, calls: int
) -> Result:
    scene = Scene(backend, rows, dim, rows)
    ours = Asking(scene, batch, calls)
    if torch is None:
        vectors, against = to_device(scene.memory, scene.vectors), "cupy.take, index copied up"

        def take(call: int) -> None:
            xp.take(vectors, xp.asarray(ours.places[call]), axis=0, out=ours.out)
            backend.synchronize()

    else:
        tensor, against = torch.from_numpy(scene.vectors).cuda(), "PyTorch's tensor[index], index copied up"

        def take(call: int) -> None:
            tensor[torch.from_numpy(ours.places[call]).cuda()]
            torch.cuda.synchronize()

    got = alternate(backend, rounds, calls, ours, take)
    scene.close()
    return timed("keys", rows, dim, batch, against, got)


def timed(part: str, rows: int, dim: int, batch: int, against: str, got: dict[str, float]) -> Result:
    return {
        "part": part, "rows": rows, "dim": dim, "batch": batch, "against": against,
        "us": got["ours_s"] * 1e6, "theirs_us": got["theirs_s"] * 1e6, "ratio": got["ratio"],
        "keys_per_s": batch / got["ours_s"], "theirs_keys_per_s": batch / got["theirs_s"],
    }  # fmt: skip


def beside_promotion(backend: Backend, rows: int, dim: int, batch: int, rounds: int, calls: int) -> Result:
    scene = Scene(backend, rows, dim, rows // 2)
    ours, promoted, wanted, ends = Asking(scene, batch, calls), [0], threading.Event(), threading.Event()
    # half of what it has, and none that is asked for: they come and go
    others = np.setdiff1d(np.arange(len(scene.keys)), scene.resident(), assume_unique=True)

    def promote() -> None:
        while not ends.is_set():
            if not wanted.wait(0.01):
                continue
            at = others[(promoted[0] + np.arange(4096)) % len(others)]
            scene.table.exchange(scene.keys[at], scene.vectors[at].view(np.uint8), 1)
            promoted[0] += 4096

    promoter = threading.Thread(target=promote)
    promoter.start()

    def beside(call: int) -> None:
        wanted.set()
        ours(call)

    def alone(call: int) -> None:
        wanted.clear()
        ours(call)

    try:
        got = alternate(backend, rounds, calls, beside, alone)
    finally:
        ends.set()
        promoter.join()
    scene.close()
    return timed("beside", rows, dim, batch, "the same alone", got) | {"promoted_rows": promoted[0]}


def tenth(backend: Backend, rows: int, dim: int, batch: int, rounds: int, calls: int) -> Result:
    scene = Scene(backend, rows, dim, rows * 9 // 10)
    scene.table.read_below(scene.host)
    ours, above = Asking(scene, batch, calls, below=10), Asking(scene, batch, calls)
    got = alternate(backend, rounds, calls, ours, above)
    scene.close()
    return timed("tenth", rows, dim, batch, "all on the device", got)


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
    scene = Scene(backend, rows, dim, rows)
    asking = [Asking(scene, batch, 4) for _ in range(THREADS)]

    def work(number: int) -> None:
        for call in range(calls):
            asking[number](call % 4)

    with ThreadPoolExecutor(THREADS) as pool:

        def together(count: int) -> Callable[[int], None]:
            return lambda call: list(pool.map(work, range(count)))

        got = alternate(backend, rounds, 1, together(THREADS), together(1))
    scene.close()
    many, one = THREADS * calls * batch / got["ours_s"], calls * batch / got["theirs_s"]
    return {
        "part": "threads", "rows": rows, "dim": dim, "batch": batch, "against": f"one thread, {THREADS} here",
        "keys_per_s": many, "theirs_keys_per_s": one, "ratio": many / one,
    }  # fmt: skip


def in_stream(asking: Asking, calls: int, *, put_off: bool = True) -> Callable[[int], None]:
    """Look-ups in the order of a stream, or, if they are not put off, each waited for; then a wait for the stream."""
    backend = asking.scene.backend
    stream = backend.stream()

    def nothing(*_: Any) -> Any:
        return 0

    def ask(call: int) -> None:
        with backend.in_stream(getattr(stream, "_stream", stream)):
            for number in range(TABLES):
                pending_lookup = PendingLookup(lambda: nothing, nothing)
                asking((call + number) % calls, pending_lookup if put_off else None)
                assert pending_lookup.begun == put_off
        stream.synchronize()

    return ask


def streamed(backend: Backend, rows: int, dim: int, batch: int, rounds: int, calls: int) -> Result:
    scene = Scene(backend, rows, dim, rows)
    ours = Asking(scene, batch, calls)
    got = alternate(backend, rounds, calls, in_stream(ours, calls), in_stream(ours, calls, put_off=False))
    scene.close()
    return timed("streamed", rows, dim, batch, f"the same {TABLES}, each waited for", got)


def changed(backend: Backend, rows: int, dim: int, batch: int, rounds: int, calls: int) -> Result:
    scene = Scene(backend, rows, dim, rows)
    some = slice(None, None, 100)  # whose rows are what they were
    keys, stored = scene.keys[some], np.ascontiguousarray(scene.vectors[some]).view(np.uint8)
    delta = OverlayTable(scene.spec, keys, stored, np.zeros(len(keys), np.bool_))
    beside, alone = (Asking(scene, batch, calls, there=True, delta=of) for of in (delta, None))
    got = alternate(backend, rounds, calls, in_stream(beside, calls), in_stream(alone, calls))
    scene.close()
    return timed("changed", rows, dim, batch, "the same without the delta", got)


def together(backend: Backend, rows: int, dim: int, batch: int, rounds: int, calls: int) -> Result:
    scene = Scene(backend, rows, dim, rows)
    ours = [Asking(scene, batch, calls) for _ in range(ANSWERING)]

    def at_once(call: int) -> None:
        look_ups = [one.look_up(call) for one in ours]
        assert all(look_up.begin() for look_up in look_ups)
        assert all(look_up.finish() for look_up in look_ups)

    def in_turn(call: int) -> None:
        for one in ours:
            one(call)

    got = alternate(backend, rounds, calls, at_once, in_turn)
    scene.close()
    return timed("together", rows, dim, batch, f"the same {ANSWERING}, one after the other", got)


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
    states: list[np.ndarray] = []

    def ours(call: int) -> None:
        state = np.zeros(batch, np.uint8)
        tiers = OtherTiers(scene.fetch, scene.host)
        assert LookUp(scene.table, asked[call], state, GpuArray.of(backend, out), tiers).finish()
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


def pooled(backend: Backend, torch: Any, rows: int, dim: int, bags: int, bag: int, rounds: int, calls: int) -> Result:
    scene = Scene(backend, rows, dim, rows)
    there, state = scene.resident(), np.zeros(bags * bag, np.uint8)
    rng = np.random.default_rng(5)
    places = [there[rng.integers(0, len(there), bags * bag)] for _ in range(calls)]
    keys = [scene.keys[at] for at in places]
    pooling = Pooling(check_offsets(np.arange(0, bags * bag, bag), bags * bag), None, Combiner.MEAN)
    out = backend.empty((bags, dim), np.float32)
    module = torch.nn.EmbeddingBag.from_pretrained(torch.from_numpy(scene.vectors).cuda(), mode="mean")
    starts = torch.from_numpy(pooling.offsets).cuda()

    def ours(call: int) -> None:
        state[:] = 0
        tiers = OtherTiers(scene.fetch)
        assert LookUp(scene.table, keys[call], state, GpuArray.of(backend, out), tiers, pooling).finish()

    def embedding_bag(call: int) -> None:
        module(torch.from_numpy(places[call]).cuda(), starts)
        torch.cuda.synchronize()

    got = alternate(backend, rounds, calls, ours, embedding_bag)
    scene.close()
    return timed("pooled", rows, dim, bags * bag, "torch.nn.EmbeddingBag, keys from CPU memory", got) | {"bag": bag}


def parts(
    backend: Backend, xp: Any, torch: Any, *, rows: int, batch: int, rounds: int, calls: int, hkv: Any = None
) -> dict[str, Callable[[], list[Result]]]:
    """What measures each part, the most wanted first."""
    sizes = sorted({min(size, batch) for size in (64, 1024, 4096, batch)})

    def each(part: Callable[..., Result], sizes: list[int], *before: Any) -> Callable[[], list[Result]]:
        return lambda: [part(backend, *before, rows, 64, size, rounds, calls) for size in sizes]

    def by_dim(part: Callable[..., Result], *before: Any) -> list[Result]:
        return [part(backend, *before, rows, dim, batch, rounds, calls) for dim in (32, 64)]

    def kernels() -> list[Result]:
        peers = [] if hkv is None else [resident(backend, xp, rows, 64, size, rounds, calls, hkv) for size in (batch, 16 * batch)]  # fmt: skip
        return by_dim(resident, xp) + peers

    def bags() -> list[Result]:
        shapes = [] if torch is None else [(2048, 32), (512, 16), (3276, 20)]
        return [
            pooled(backend, torch, rows, 64, max(1, bags * batch >> 16), bag, rounds, calls) for bags, bag in shapes
        ]

    def served(part: Callable[..., list[Result]], *before: Any) -> Callable[[], list[Result]]:
        return lambda: part(*before, min(rows, 200_000), rounds, calls)

    return {
        "keys": each(from_cpu_memory, sizes, xp, torch),
        "streamed": each(streamed, sizes[:-1]),
        "beside": each(beside_promotion, sizes),
        "tenth": each(tenth, sizes),
        "pooled": bags,
        "resident": kernels,
        "filled": lambda: [filled(backend, rows, 64, rounds)],
        "threads": each(threads, [min(4096, batch)]),
        "module": list if torch is None else served(device_served.module, torch),
        "predicted": served(device_served.predicted),
        "changed": each(changed, sizes[:-1]),
        "together": each(together, sizes[:-1]),
        "tiered": lambda: by_dim(tiered),
    }


TINY = {"rows": 20_000, "batch": 2048, "rounds": 2, "calls": 4}
WHOLE = {"rows": 1_000_000, "batch": 65_536, "rounds": 21, "calls": 16}


def main() -> None:
    options = parser_of(
        __file__, __doc__, "tiny", hkv=(Path, "where the headers of HierarchicalKV are, or its library, built before"),
        parts=(["all"], "some of the parts, in this order"),
    ).parse_args()  # fmt: skip
    document: dict[str, Any] = {"benchmark": "device_lookup", "machine": describe(), "results": [], "skipped": []}
    count, why = find_devices()
    if not count:
        document["skipped"].append(f"nothing was measured: {why}")
    else:
        torch = import_module("torch") if importlib.util.find_spec("torch") else None
        if torch is None or not torch.cuda.is_available():
            torch = None
            document["skipped"].append("pooled, module: torch is not installed, or sees no GPU")
        cupy, missing = import_module("cupy"), hierarchical_kv.why_not(options.hkv)
        hkv = None if missing else hierarchical_kv.built(options.hkv, cupy.cuda.Device(0).compute_capability)
        if missing:
            document["skipped"].append(f"HierarchicalKV: {missing}")
        known = parts(CudaDevice(0), cupy, torch, hkv=hkv, **(TINY if options.tiny else WHOLE))
        for name in known if options.parts == ["all"] else options.parts:
            try:
                document["results"] += known[name]()
            except TierstoreError as error:
                document["skipped"].append(f"{name}: {error}")
            report.write(options.json, document)  # what is measured stays if a later part hangs
    report.write(options.json, document)
    print(report.markdown(document))


if __name__ == "__main__":
    main()
