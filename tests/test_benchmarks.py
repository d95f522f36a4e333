"""The benchmarks run, and say what they promise. No test here looks at how fast anything was."""

from __future__ import annotations

import ctypes
import functools
import http.server
import json
import math
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import __main__ as suite
from benchmarks import (
    device_lookup,
    hierarchical_kv,
    networks,
    production,
    report,
    triton_peer,
    wild_lookup,
)
from benchmarks.alternation import Samples, Taken, alternate, one_thread, ratio, threads
from benchmarks.contenders import Rows, Take, Tierstore, keys_of
from benchmarks.lookup_peers import PLANS, WORKLOADS, Bench, check
from benchmarks.wild_traffic import MANY, Asked, Clients, heavy_tailed, ranking, single
from benchmarks.wire_table import keys_of as keys_of_wire
from benchmarks.wire_table import rows_of, vectors_of
from tests.tiers.cuda_shim.backend import ShimDevice
from tests.triton import backend
from tierstore.types import StorageDtype

ROOT = Path(__file__).parents[1]
TINY = [benchmark.name for benchmark in suite.discover() if benchmark.arguments("tiny") is not None]
REPORTED = "lookup_peers"  # that has figures with marks and tables of every kind
TIMED = {"contender", "workload", "rows", "dim", "dtype", "batch", "threads", "keys_per_s", "p50_us", "p99_us", "ratio"}


@functools.cache
def tiny_run(name: str) -> dict[str, Any]:
    """The report of a tiny run, made once for all tests of it."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks", "--tiny", "--only", name, "--json", made],
            cwd=ROOT, capture_output=True, text=True, timeout=290,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        document: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        document["markdown"] = (folder / "report.md").read_text(encoding="utf-8")
        return document


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    """The report of a tiny run of one that has tables of every kind."""
    return tiny_run(REPORTED)


class Answering:
    """A server that answers every look-up with the same tensors."""

    def __init__(self, tensors: bytes) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.send_response(200)
                self.send_header("Inference-Header-Content-Length", "2")
                self.send_header("Content-Length", str(2 + len(tensors)))
                self.end_headers()
                self.wfile.write(b"{}" + tensors)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def of(run: dict[str, Any], name: str) -> dict[str, Any]:
    (document,) = (one for one in run["benchmarks"] if one["benchmark"] == name)
    return dict(document)


def test_the_suite_finds_what_is_there() -> None:
    assert {"lookup_peers", "ten_million", "cache_policy"} <= {b.name for b in suite.discover()}
    assert {"lookup_peers", "ten_million"} <= set(TINY)


@pytest.mark.thorough
@pytest.mark.parametrize("name", TINY)
def test_every_benchmark_runs_and_is_in_the_report(name: str) -> None:
    run = tiny_run(name)
    document = of(run, name)
    assert "failed" not in document
    assert document["machine"]
    assert document["seconds"] > 0
    assert len(document["load_before"]) == len(document["load_after"]) == 3
    assert f"## {name}\n" in run["markdown"]


@pytest.mark.thorough
def test_look_ups_beside_peers_say_what_they_promise(run: dict[str, Any]) -> None:
    document = of(run, "lookup_peers")
    timed = [row for row in document["results"] if row["part"] != "memory"]
    assert {row["part"] for row in document["results"]} == {
        "large table", "threads", "bags", "peers", "shapes", "growth", "memory",
    }  # fmt: skip
    for row in timed:
        assert row.keys() >= TIMED, row
        assert 0 < row["p50_us"] <= row["p99_us"], row
        assert row["keys_per_s"] > 0, row
        assert 0 < row["ratio"] < math.inf, row
    assert {row["workload"] for row in timed} == set(WORKLOADS)
    assert {row["dtype"] for row in timed} == {"float32", "float16", "int8", "int4"}


def test_every_peer_is_measured_or_said_to_be_left_out(run: dict[str, Any]) -> None:
    document = of(run, "lookup_peers")
    measured = {row["contender"] for row in document["results"] if row["part"] == "peers"}
    assert {"tierstore", "numpy.take", "dict of arrays", "cachetools.LRUCache"} <= measured
    assert any("TFRA CPU table" in reason for reason in document["skipped"])


def test_marks_agree_with_the_figures_beside_them(run: dict[str, Any]) -> None:
    headlines = run["headlines"]
    against = " ".join(row["against"] for row in headlines)
    for word in ("numpy.take", "cachetools.LRUCache", "one thread", "np.add.reduceat"):
        assert word in against
    for row in headlines:
        low, high = row["at_least"], row["at_most"]
        assert row["met"] == ((low is None or row["value"] >= low) and (high is None or row["value"] <= high)), row
        assert row["measured"] in run["markdown"]
    take = next(row for row in headlines if row["against"] == "numpy.take")
    table = [row for row in of(run, "lookup_peers")["results"] if row["part"] == "large table"]
    assert take["value"] == next(
        row["ratio"] for row in table if (row["contender"], row["workload"]) == ("numpy.take", "uniform")
    )


@pytest.mark.thorough
def test_memory_of_a_full_cache_is_that_of_its_rows_and_a_little_more() -> None:
    bench = Bench(PLANS["tiny"], Path("."), None)
    bench.memory()
    (row,) = bench.found.results
    assert row["filled"] > 0.99
    assert row["beyond_the_vector"] == max(row["memory_bytes_a_row"], row["bound_bytes_a_row"]) - 32 * 4
    assert 10 < row["bound_bytes_a_row"] - 32 * 4 < 20


def test_a_benchmark_that_fails_is_told_with_its_reason(tmp_path: Path) -> None:
    document = suite.run(suite.Benchmark("lookup_peers", ""), "tiny", ["--no-such-option"], tmp_path)
    assert "no-such-option" in document["failed"]
    text = suite.markdown(suite.combined([document], "tiny", 0.0))
    assert "**Failed**" in text
    assert "no-such-option" in text


def test_a_document_of_an_unknown_shape_is_shown_too() -> None:
    text = report.markdown({"benchmark": "x", "seen": {"a": 1.5}, "points": [{"p": 7, "q": {"r": True}}, {"p": 8}]})
    assert "| seen.a | 1.50 |" in text
    assert "| p | q.r |" in text
    assert "| 7 | yes |" in text


def test_a_figure_with_a_mark_can_be_written_whatever_measured_it(tmp_path: Path) -> None:
    figure = report.headline("x", "y", np.float64(1.5), at_most=2)
    report.write(tmp_path / "report.json", {"headlines": [figure]})
    assert json.loads((tmp_path / "report.json").read_text())["headlines"][0]["met"] is True


def test_what_all_rows_share_stands_above_the_table() -> None:
    lines = report.table([{"dim": 16, "ratio": 1.0}, {"dim": 16, "ratio": 2.0}])
    assert lines[0] == "dim 16."
    assert lines[2] == "| ratio |"


def test_contenders_take_turns_and_get_as_many_calls_as_fit() -> None:
    turns: list[tuple[str, int, int]] = []

    def block(name: str, seconds: float) -> Any:
        def run_block(first: int, calls: int) -> Taken:
            turns.append((name, first, calls))
            return Taken(seconds * calls, [seconds] * calls, seconds * calls)

        return run_block

    samples = alternate({"quick": block("quick", 0.001), "slow": block("slow", 0.3)}, 100, 3, 0.01)
    assert [name for name, _, _ in turns[4:]] == ["quick", "slow"] * 3
    assert {calls for name, _, calls in turns[4:] if name == "quick"} == {10}
    assert {calls for name, _, calls in turns[4:] if name == "slow"} == {1}
    assert len({first for _, first, _ in turns[4:]}) == 6, "no two blocks begin with the same batches"
    assert samples["quick"].as_dict()["keys_per_s"] == pytest.approx(100 / 0.001)
    assert ratio(samples["quick"], samples["slow"]) == pytest.approx(300)


def test_the_ratio_is_the_median_of_ratios_of_rounds() -> None:
    ours, theirs = Samples(1, [1.0, 2.0, 10.0]), Samples(1, [2.0, 6.0, 10.0])
    assert ratio(ours, theirs) == 2.0  # of 2, 3 and 1; that of the medians would be 3


def test_calls_of_all_threads_share_the_wall_time() -> None:
    done: list[list[int]] = [[], []]
    taken = threads([done[0].append, done[1].append])(10, 5)
    assert done == [[10, 11, 12, 13, 14], [15, 16, 17, 18, 19]]
    assert len(taken.calls) == 10
    samples = Samples(1)
    samples.add(taken)
    assert samples.rounds == [taken.whole / 10]


def test_one_thread_times_every_call() -> None:
    done: list[int] = []
    taken = one_thread(done.append)(3, 4)
    assert done == [3, 4, 5, 6]
    assert sum(taken.calls) == pytest.approx(taken.whole)


def test_keys_are_distinct_and_spread() -> None:
    keys = keys_of(np.arange(100_000))
    assert len(np.unique(keys)) == 100_000
    assert 0.49 < np.mean(keys < 0) < 0.51


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [StorageDtype.FLOAT32, StorageDtype.FLOAT16, StorageDtype.INT8, StorageDtype.INT4])
def test_a_wrong_answer_stops_the_benchmark(dtype: StorageDtype) -> None:
    rows = Rows(500, 8, dtype)
    ours = Tierstore(rows)
    positions = ours.resident(rows)[:100]
    session, out = ours.session(), np.empty((100, 8), np.float32)
    check("tierstore", rows, positions, lambda _: session(keys_of(positions), out), out)
    with pytest.raises(AssertionError, match="other rows"):
        check("tierstore", rows, positions, lambda _: session(keys_of(positions[::-1].copy()), out), out)
    ours.close()


def test_taking_and_decoding_with_numpy_is_what_answers_are_compared_with() -> None:
    rows = Rows(50, 4, StorageDtype.INT8)
    out = np.empty((3, 4), np.float32)
    Take(rows, decode=True).session()(np.array([4, 40, 4]), out)
    np.testing.assert_array_equal(out, rows.answer(np.array([4, 40, 4])))


def in_production(results: list[dict[str, Any]], trace: str) -> None:
    """The first part of `wild_lookup` and `wild_predict`, which are tiny with a trace each, has both services, and one of them lacks rows."""
    rows = [row for row in results if row["part"] == "production"]
    assert [(row["trace"], row["service"]) for row in rows] == [(trace, "production"), (trace, "memory")]
    for row in rows:
        assert row["cpu_ns_a_key"] > 0, row
        assert 0 < row["p50_us"] <= row["p99_us"], row
        assert 0 <= row["compiled"] <= 1, row
        if row["service"] == "memory":
            assert (row["cpu_ratio"], row["p50_ratio"], row["p99_ratio"]) == (1, 1, 1), row
            assert (row["from_disk"], row["from_overlay"]) == (pytest.approx(0, abs=0.001), 0), row
        else:
            assert 0.5 < row["hit_rate"] < 0.98, row  # most from memory, how many says a run of full size
            assert 0 <= row["from_overlay"] < 1, row  # none where folds come before the next request
            assert row["s_between_deltas"] > 0, row


@pytest.mark.thorough
def test_wild_predictions_are_measured_in_production_and_beside_what_they_are_made_of() -> None:
    results = of(tiny_run("wild_predict"), "wild_predict")["results"]
    in_production(results, production.TRACES[1])
    assert {row["part"] for row in results} == {"production", *networks.NETWORKS}


def test_rows_asked_for_often_are_those_that_are_warm_and_that_deltas_change() -> None:
    trace = production.Trace("ads reuse", 5000)
    assert sorted(trace.hottest) == list(range(5000))
    asked, warm = trace(20_000), trace.hottest[:500]
    assert np.isin(asked, warm).mean() > 0.5
    changed = trace.changed()
    assert len(set(changed)) == len(changed) <= 5000 // production.DELTA_SHARE
    assert np.isin(changed, asked).mean() > 0.9
    np.testing.assert_array_equal(rows_of(keys_of_wire(np.arange(100))), np.arange(100))


def test_values_are_compared_unless_a_delta_came_between() -> None:
    service, changes = Answering(b"\0" * 128), iter([0, 1, 2, 2])
    with pytest.raises(AssertionError), closing(Clients(os.getpid(), service.port, 1)) as clients:
        clients.turn([single(np.arange(1, 2))])
    with closing(Clients(os.getpid(), service.port, 1, stamp=lambda: next(changes))) as clients:
        clients.turn([single(np.arange(1, 2))])  # 0 before it and 1 after it
        with pytest.raises(AssertionError):
            clients.turn([single(np.arange(1, 2))])
    service.close()


@pytest.mark.thorough
def test_wild_traffic_is_what_it_says() -> None:
    results = of(tiny_run("wild_lookup"), "wild_lookup")["results"]
    assert {row["part"] for row in results} >= {"sizes", "wild", "strings"}
    in_production(results, production.TRACES[0])
    for row in results:
        if row["part"] == "production":
            continue
        assert row["cpu_us"] > 0, row
        assert 0 < row["ratio_a_key"] < math.inf, row
        assert row["requests"] == "Redis MGET" or 0 <= row["by_reactors"] <= 1, row


@pytest.mark.thorough
def test_costs_by_where_rows_are_are_measured_in_the_states_that_they_name() -> None:
    results = of(tiny_run("tier_costs"), "tier_costs")["results"]
    assert {row["part"] for row in results} == {
        f"{what}, {way}" for what in ("look-up of 64 keys", "prediction of 100 items") for way in ("HTTP", "gRPC")
    }
    on_disk = {"memory": 0.0, "1% disk": 0.01, "5% disk": 0.05, "20% disk": 0.2, "1% changed": 0.01}
    for row in results:
        assert row["cpu_us"] > 0, row
        assert 0 < row["p50_us"] <= row["p99_us"], row
        assert 0 <= row["compiled"] <= 1, row
        if row["state"] in on_disk:
            assert row["from_disk"] == pytest.approx(on_disk[row["state"]], abs=0.004), row
        else:
            assert 0 < row["from_disk"] + row["from_overlay"] < 0.014, row  # some of them have come into memory since
            assert row["delta_us"] > 0, row


def test_sizes_of_wild_traffic_are_spread_and_within_bounds() -> None:
    rng = np.random.default_rng(5)
    drawn = wild_lookup.at_random(rng, 3000, 400)
    assert (min(drawn) < 10, max(drawn) > 2990, len(set(drawn)) > 390) == (True, True, True)
    assert abs(np.mean(drawn) - 1500.5) < 10
    assert drawn != sorted(drawn)
    sizes = heavy_tailed(rng, 50, 1500, 10_000)
    assert sizes.min() >= 1
    assert sizes.max() == 1500
    assert 45 < np.median(sizes) < 55
    assert np.mean(sizes) > 1.5 * np.median(sizes)


def test_requests_of_one_size_have_as_many_keys_as_the_wild_ones_have_on_average() -> None:
    keys, rng = wild_lookup.Keys(1000, 1), np.random.default_rng(6)
    wild = wild_lookup.wild(keys, rng, 26)
    assert len({one.rest.count(b"binary_data_size") for one in wild}) > 20, "1 to 26 features"
    assert len({one.keys for one in wild}) > 20
    for features in (1, MANY // 2):
        alike = wild_lookup.alike(keys, 850.0, 10, features)
        assert len({(one.rest, one.keys) for one in alike}) == 1
        assert len({one.tensors for one in alike}) == 10
        assert abs(alike[0].keys - 850) < 20


def test_sums_of_bags_are_those_that_a_loop_adds_up() -> None:
    keys = np.arange(1000, 1012)
    asked = Asked("f00", keys, np.array([0, 3, 3, 7]))
    rows = vectors_of(keys)
    expected = [rows[0:3].sum(0), rows[3:3].sum(0), rows[3:7].sum(0), rows[7:12].sum(0)]
    np.testing.assert_array_equal(asked.expected(), np.array(expected))
    tags = np.array([2, 0, 1])
    made = ranking(lambda count: np.zeros(count, np.int64), 4, 3, 5, tags)
    assert made.keys == 3 + 1 + 3 + 5
    assert made.answer_bytes == (3 + 1 + 3 + 1) * 128


def test_a_request_of_wild_traffic_carries_its_id_and_true_lengths() -> None:
    made = single(np.arange(3)).bytes("a-7")
    head, _, body = made.partition(b"\r\n\r\n")
    fields = dict(line.split(b": ") for line in head.split(b"\r\n")[1:])
    length = int(fields[b"Inference-Header-Content-Length"])
    assert int(fields[b"Content-Length"]) == len(body) == length + 24
    assert json.loads(body[:length])["id"] == "a-7"
    assert b'"id"' not in single(np.arange(3)).bytes(None)


def test_wild_traffic_stops_at_an_answer_of_another_size_or_with_other_rows() -> None:
    asked = single(np.arange(3))
    right = vectors_of(np.arange(3)).tobytes()
    Clients._check(memoryview(right), asked, values=True)
    with pytest.raises(RuntimeError, match="expected 384 bytes"):
        Clients._check(memoryview(right[:-4]), asked, values=False)
    with pytest.raises(AssertionError):
        Clients._check(memoryview(right[128:] + right[:128]), asked, values=True)


def test_without_triton_its_benchmark_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(triton_peer.Unavailable, match="make bench-triton"):
        triton_peer.Packages.at(tmp_path / "none")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.wire_triton", "--tiny", "--triton", str(tmp_path / "none"), "--json", str(tmp_path / "at")],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (said,) = json.loads((tmp_path / "at").read_text())["skipped"]
    assert "none" in said


def test_the_model_that_triton_runs_takes_the_rows_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = backend.module()
    vars(stand_in).update(get_input_tensor_by_name=lambda of, name: of[name])
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    made = runpy.run_path(str(triton_peer.SCRIPT))["TritonPythonModel"]()
    table = vectors_of(np.arange(50))
    np.save(tmp_path / "table.npy", table)
    config = {
        "parameters": {"table": {"string_value": str(tmp_path / "table.npy")}},
        "input": [{"name": "keys"}], "output": [{"name": "rows"}],
    }  # fmt: skip
    made.initialize({"model_config": json.dumps(config)})
    (answer,) = made.execute([{"keys": backend.Tensor("keys", np.array([7, 3, 7]))}])
    assert set(answer.arrays) == {"rows"}
    np.testing.assert_array_equal(answer.arrays["rows"], table[[7, 3, 7]])


class _Peer:
    """HierarchicalKV's functions over rows that tell their keys, at addresses of the stand-in's memory."""

    def __init__(self) -> None:
        self.known: dict[int, np.ndarray] = {}

    def hkv_open(self, capacity: Any, dim: Any) -> int:
        assert capacity.value & (capacity.value - 1) == 0
        self.dim = dim.value
        return 1

    def _array(self, at: Any, dtype: Any, *shape: int) -> np.ndarray:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer((ctypes.c_char * nbytes).from_address(at.value), dtype).reshape(shape)

    def hkv_insert(self, table: Any, n: Any, keys: Any, vectors: Any) -> None:
        rows = self._array(vectors, np.float32, n.value, self.dim).copy()
        self.known |= dict(zip(self._array(keys, np.int64, n.value).tolist(), rows, strict=True))

    def hkv_find(self, table: Any, n: Any, keys: Any, vectors: Any, found: Any) -> None:
        out = self._array(vectors, np.float32, n.value, self.dim)
        out[:] = [self.known[key] for key in self._array(keys, np.int64, n.value).tolist()]

    def hkv_close(self, table: Any) -> None:
        self.known.clear()


@pytest.mark.thorough
def test_hierarchical_kv_is_measured_where_its_headers_are(tmp_path: Path) -> None:
    assert "--hkv" in str(hierarchical_kv.why_not(None))
    assert "no merlin_hashtable.cuh" in str(hierarchical_kv.why_not(tmp_path))
    (tmp_path / "merlin_hashtable.cuh").touch()
    assert (hierarchical_kv.why_not(tmp_path) is None) is (shutil.which("nvcc") is not None)
    result = device_lookup.resident(ShimDevice(1 << 30), np, 2000, 8, 128, 1, 2, hkv=_Peer())
    assert result["against"] == "HierarchicalKV's find"


@pytest.mark.thorough
def test_the_device_benchmark_compares_like_with_like() -> None:
    """On the stand-in for a GPU, so that it runs at all on the first machine that has one; its figures mean nothing."""
    parts = device_lookup.parts(ShimDevice(1 << 30), np, None, rows=2000, batch=128, rounds=1, calls=2)
    del parts["predicted"]  # wants ONNX Runtime on a GPU
    several = {"resident": [32, 64], "tiered": [32, 64], "keys": [64, 64], "beside": [64, 64], "tenth": [64, 64]}
    several |= {"pooled": [], "module": []}  # want PyTorch
    dims = {name: several.get(name, [64]) for name in parts}
    measured = {name: measure() for name, measure in parts.items()}
    assert {name: [one["dim"] for one in results] for name, results in measured.items()} == dims
    results = [one for name, part in measured.items() for one in part if one["part"] == name]
    assert len(results) == sum(map(len, dims.values()))
    assert {one["host_tier_read_by"] for one in results if one["part"] == "tiered"} == {"the device"}
    assert all(one["ratio"] > 0 for one in results)
    assert all(0.5 < one["device_hits"] < 1 for one in results if one["part"] == "tiered")
