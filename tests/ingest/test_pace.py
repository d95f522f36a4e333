"""Helpers of a load keep to the share of the time that they are given while they are at it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import tierstore
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.ingest.helpers import Helpers
from tierstore.ingest.tasks import SortShards


def test_a_helper_stands_still_at_a_share_of_nothing_and_goes_on_after_it(tmp_path: Path) -> None:
    with tierstore.SnapshotWriter(tmp_path / "s", model="m", version=1) as writer:
        table = writer.table("t", dim=8)
        for begin in range(0, 200_000, 5000):
            table.write(np.arange(begin, begin + 5000), np.ones((5000, 8), np.float32))
        writer.feature("f", table="t")
    share, seen, stood = [1.0], [], []
    shards = len(open_snapshot(tmp_path / "s").manifest.tables[0].shards)
    task = SortShards("t", list(range(shards)), str(tmp_path / "run"), 1 << 20, 8192)
    with Helpers(open_snapshot(tmp_path / "s"), 1, tmp_path, share=lambda: share[0]) as helpers:

        def tick(rows: int) -> None:
            seen.append(rows)
            if share[0] == 1.0 and sum(seen) > 1000 and not stood:
                share[0] = 0.0
                stood.append(time.monotonic() + 1.0)
            elif share[0] == 0.0 and time.monotonic() > stood[0]:
                stood.append(sum(seen))
                share[0] = 1.0

        (result,) = helpers.run([task], tick)
    assert sum(rows for _, rows in result.runs) == sum(seen) == 200_000
    assert stood[1] < 200_000, "it was done before it could stand still"


SCRIPT = """
import signal, sys, threading, time
import numpy as np
from tierstore.kernels.slices import Slices

def give(share):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    slices.append(slices[0] if slices else Slices())
    slices[0].set_share(share)

slices, rows = [], np.random.default_rng(1).integers(0, 1 << 60, 400_000)
for share in (0.1, 1.0):
    thread = threading.Thread(target=give, args=(share,))
    thread.start()
    thread.join()
    began, worked = time.perf_counter(), time.thread_time()
    for _ in range(4):
        assert (np.diff(np.sort(rows)) >= 0).all()
    print((time.thread_time() - worked) / (time.perf_counter() - began))
"""


def test_slices_stop_the_main_thread_in_the_midst_of_compiled_work_and_let_it_go() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    sliced, whole = map(float, done.stdout.split())
    assert sliced < 0.4, "a tenth, and what it takes to stop and go on"
    assert whole > sliced
