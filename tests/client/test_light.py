"""Machines that only ask, or only train: with few packages, and no store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.client.test_service import delta, opened, write_snapshot
from tierstore.service.server import ServerThread

ONLY_THESE = """
import sys
from importlib.metadata import packages_distributions

absent = packages_distributions().keys() - ALLOWED - {"tierstore"}

class OnlyThese:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in absent:
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, OnlyThese())
"""
CLIENT = """
import tierstore

url, path = sys.argv[1:]
with tierstore.Client(url) as client:
    ctr = client.model("ctr")
    rows, found = ctr.lookup("item_id", [1, 2, 10**9], return_found=True)
    assert rows.shape == (3, 8) and found.tolist() == [True, True, False]
    assert ctr.lookup("query", ["ä"]).shape == (1, 3)
    assert client.apply_delta(path).applied
    assert ctr.lookup("item_id", [1])[0, 0] == 6

assert "asyncio" not in sys.modules
import asyncio

async def ask():
    async with tierstore.AsyncClient(url) as client:
        return await client.model("ctr").lookup_bags("clicked", [1, 1], [0, 1])

assert asyncio.run(ask())[0, 0] == 6
"""


def test_the_client_needs_three_packages(tmp_path: Path) -> None:
    path = tmp_path / "6.arrow"
    path.write_bytes(delta(6, [1]))
    with opened(tmp_path) as store:
        store.load_snapshot(write_snapshot(tmp_path, 1))
        with ServerThread(store, store.settings) as server:
            run({"numpy", "orjson", "pyarrow"}, CLIENT, server.url, str(path))


TRAINER = """
import tierstore

with tierstore.SnapshotWriter(sys.argv[1] + "/s", model="m", version=1) as snapshot:
    snapshot.table("item", dim=2).write([1, 2], [[1.0, 2.0], [3.0, 4.0]])
    snapshot.table("word", dim=2, key="string").write(["a"], [[1.0, 2.0]])
    snapshot.feature("item_id", table="item")
with tierstore.DeltaWriter(sys.argv[1] + "/1.arrow", model="m", seq=1) as delta:
    delta.upsert("item", [1], [[5.0, 6.0]])
    delta.delete("item", [2])
rows = {"key": [1], "vector": [[1.0, 2.0]]}
tierstore.import_table(rows, model="i", table="item", out=sys.argv[1] + "/i", version=1)
"""


def test_a_trainer_needs_five_packages_and_what_they_need(tmp_path: Path) -> None:
    own = {"annotated_types", "llvmlite", "pydantic_core", "typing_extensions", "typing_inspection"}
    run({"numpy", "pyarrow", "xxhash", "numba", "pydantic"} | own, TRAINER, str(tmp_path))
    with opened(tmp_path) as store:
        store.load_snapshot(tmp_path / "s")
        store.apply_delta(tmp_path / "1.arrow")
        rows, found = store.model("m").lookup("item_id", [1, 2], return_found=True)
    assert (rows[0].tolist(), found.tolist()) == ([5, 6], [True, False])


def run(allowed: set[str], program: str, *words: str) -> None:
    """The program, where no packages but the allowed ones are installed."""
    command = [sys.executable, "-c", f"ALLOWED = {allowed!r}\n{ONLY_THESE}{program}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
