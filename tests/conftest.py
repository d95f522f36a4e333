"""For all tests: kernels are compiled before processes share them, and long files come first.

`make test` runs the files of tests in several processes (pytest-xdist); plain `pytest` runs in one.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.compiled.__main__ import compile_kernels
from tests.counts import few_or_many
from tierstore.ingest import load_plan

settings.register_profile(
    "patient", settings(), deadline=None, max_examples=few_or_many(30, 100)
)  # another machine may be slower, or busy
settings.load_profile("patient")

HERE = Path(__file__).parent
STRUCTURE = HERE / "structure"  # reads sources, and runs none of them
LEAST_FREE = 5 << 30  # bytes: a store on a fuller disk refuses what tests do
# Files that take longest, the longest first. With several processes the run is as long as the one that ends last.
LONG = (
    "deploy/test_image", "test_benchmarks", "ingest/test_resume", "test_docs_commands", "test_examples", "engine/test_faults",
    "service/sources/test_kafka_real", "engine/operations/test_object_outages", "test_site", "engine/operations/test_object_loads",
    "engine/placements/cluster/test_failover", "engine/serving/test_undo", "interop/test_grpc_programs", "ingest/test_bulkload",
    "engine/test_partitions", "engine/serving/test_canary_faults", "engine/operations/test_backup", "torch/test_own_tables", "interop/test_feast",
    "engine/placements/cluster/test_cuts", "engine/data/test_device_tier", "tiers/test_device_lookup", "engine/test_torn",
    "service/sources/test_peers", "triton/test_server", "kernels/test_cache_places", "client/test_rollout",
    "service/sources/test_kafka", "service/reactor/test_predictions", "engine/placements/cluster/test_cluster", "interop/test_look_ups",
    "tiers/test_disk", "service/test_first_start", "service/upstream/test_front", "torch/test_golden", "cli/test_commands",
    "tiers/test_cluster_answers", "service/sources/test_peer_processes", "test_docs", "service/test_listener_bounds",
    "engine/placements/cluster/test_load_parts", "engine/lifecycle/test_unfinished", "service/http/test_slow_clients",
    "predict/test_golden_trainers", "engine/serving/test_canary", "service/sources/test_locations_in_storage",
    "ingest/test_partitioned", "torch/test_export", "engine/lifecycle/test_switch", "engine/lifecycle/test_start",
    "engine/operations/test_export", "engine/operations/test_golden", "test_fuzz", "service/admin/test_page",
    "service/sources/test_kafka_made_anew", "demo/test_story", "engine/lifecycle/test_ttl_faults", "service/reactor/test_reactor",
    "engine/lifecycle/test_copied_moments", "engine/placements/cluster/test_rollback_to", "engine/deltas/test_dense_accepted",
    "engine/operations/test_object_writes", "service/reactor/test_tensorflow_serving", "engine/test_outage",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Compile all kernels before the tests, in several processes: else each test process would compile those that it calls."""
    only_read = config.option.collectonly or all(
        Path(each.split("::")[0]).resolve() == STRUCTURE for each in config.args
    )
    if hasattr(config, "workerinput") or only_read:  # of pytest-xdist: one of its processes
        return
    where = Path(tempfile.gettempdir())
    if (free := shutil.disk_usage(where).free) < LEAST_FREE:
        pytest.exit(
            f"{where} has {free >> 20:,} MiB free, and tests take {LEAST_FREE >> 20:,}: free some, or set TMPDIR", 2
        )
    compile_kernels(of_tests=bool(config.getoption("numprocesses", None)))  # else a test compiles those that it calls


def pytest_collectstart() -> None:
    gc.disable()  # what is made now stays until the end


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {HERE / f"{name}.py": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))  # stable: all else stays in its order


def pytest_collection_finish() -> None:
    """What there is by now, half a million objects, is not looked through for garbage in each test."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _one_trust_store() -> Iterator[None]:
    """httpx reads the certificates of all authorities for each client and each `httpx.get`, which takes 40 ms of a processor: read once."""
    if importlib.util.find_spec("httpx") is None:  # older-trainers
        yield
        return
    from httpx._transports import default

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "create_ssl_context", functools.cache(default.create_ssl_context))
        yield


@pytest.fixture
def own_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that are about helper processes: small loads have them too."""
    monkeypatch.setattr(load_plan, "SMALL_BYTES", -1)
