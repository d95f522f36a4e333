"""For all tests: kernels are compiled before processes share them, and long files come first.

`make test` runs the files of tests in several processes (pytest-xdist); plain `pytest` runs in one.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.counts import few_or_many
from tierstore.ingest import plan
from tierstore.kernels import ahead

settings.register_profile(
    "patient", settings(), deadline=None, max_examples=few_or_many(30, 100)
)  # another machine may be slower, or busy
settings.load_profile("patient")

HERE = Path(__file__).parent
STRUCTURE = HERE / "structure"  # reads sources, and runs none of them
# Files that take longest, the longest first. With several processes the run is as long as the one that ends last.
LONG = (
    "deploy/test_image", "ingest/test_resume", "engine/test_faults", "service/sources/test_kafka_real", "test_benchmarks",
    "service/sources/test_locations_in_storage", "tiers/test_disk", "test_docs_commands", "engine/lifecycle/test_unfinished",
    "ingest/test_bulkload", "engine/lifecycle/test_corrupt", "upgrade/test_upgrade", "engine/lifecycle/test_switch", "engine/test_crash",
    "service/sources/test_peer_processes", "engine/test_model_based", "test_site", "engine/test_partitions", "engine/lifecycle/test_full_disk",
    "client/test_rollout", "engine/serving/test_canary", "cli/test_commands", "engine/operations/test_object_loads",
    "engine/operations/test_object_writes", "engine/operations/test_object_outages", "service/reactor/test_differential", "demo/test_story",
    "service/test_first_start", "interop/test_look_ups", "service/http/test_slow_clients", "service/sources/test_kafka",
    "engine/placements/cluster/test_cluster", "tiers/test_remote", "tiers/test_device_lookup", "tiers/test_device",
    "engine/data/test_device_tier", "service/http/test_http2_hostile", "deploy/test_alerts", "service/upstream/test_front",
    "engine/operations/test_backup", "cli/test_fleet", "cli/test_processes", "service/rpc/test_silent", "service/sources/test_kafka_rows",
    "tiers/test_remote_faults", "service/sources/test_locations", "service/limits/test_room", "test_examples", "test_fuzz",
    "ingest/test_partitioned", "service/sources/test_peers", "service/sources/test_peer_copies", "interop/test_feast", "interop/test_kserve",
    "interop/test_grpc_programs", "interop/test_clients", "service/reactor/test_predictions", "kernels/test_cache_places", "triton/test_server",
)  # fmt: skip


def _compile(kernels: Path) -> None:
    importlib.import_module(f"tests.compiled.{kernels.stem}")


def pytest_configure(config: pytest.Config) -> None:
    """Compile all kernels before the tests, in several processes: else each test process would compile those that it calls."""
    only_read = config.option.collectonly or all(
        Path(each.split("::")[0]).resolve() == STRUCTURE for each in config.args
    )
    if not hasattr(config, "workerinput") and not only_read:  # of pytest-xdist: one of its processes
        ahead.compile_all(len(os.sched_getaffinity(0)))
        if config.getoption("numprocesses", None):  # each of them would compile those of tests too, for half a minute
            files = sorted((HERE / "compiled").glob("[!_]*.py"), key=lambda file: -file.stat().st_size)
            with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
                pool.map(_compile, files, chunksize=1)


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
    monkeypatch.setattr(plan, "SMALL_BYTES", -1)
