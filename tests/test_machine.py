"""What a control group allows is what there is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tierstore.config import Settings
from tierstore.machine import memory_bytes, processors

ALL, EVERYTHING = len(os.sched_getaffinity(0)), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("group", "files", "memory", "cpus"),
    [
        ("0::/a/b", {"a/b/memory.max": "600000000", "a/b/cpu.max": "50000 100000"}, 600_000_000, 1),
        ("0::/a/b", {"a/memory.max": "500000000", "a/b/memory.max": "max", "a/cpu.max": "100000 100000"}, 500_000_000, 1),
        ("0::/", {"memory.max": "700000000", "cpu.max": "max 100000"}, 700_000_000, ALL),
        ("0::/", {"memory.high": "800000000", "cpu.max": "9900000 100000"}, 800_000_000, min(ALL, 99)),
        ("4:memory:/x\n2:cpu,cpuacct:/y", {
            "memory/x/memory.limit_in_bytes": "400000000", "cpu,cpuacct/y/cpu.cfs_quota_us": "90000",
            "cpu,cpuacct/y/cpu.cfs_period_us": "100000",
        }, 400_000_000, 1),
        ("4:memory:/gone", {"memory/memory.limit_in_bytes": "300000000", "memory/cpu.max": "1 1"}, 300_000_000, ALL),
        ("2:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, EVERYTHING, ALL),
        ("", {}, EVERYTHING, ALL),
        ("nonsense", {"memory.max": "what", "cpu.max": "1 0"}, EVERYTHING, ALL),
    ],
)  # fmt: skip
def test_the_least_limit_around_the_process_counts(tmp_path, group, files, memory, cpus):
    proc = put(tmp_path, {"proc": group}) / "proc"
    groups = put(tmp_path / "groups", files)
    assert memory_bytes(proc, groups) == memory
    assert processors(proc, groups) == cpus
    assert memory_bytes(tmp_path / "none", groups) == EVERYTHING


def test_the_default_budget_is_half_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tierstore.config.values.memory_bytes", lambda: 600_000_000)
    assert Settings(data=tmp_path).host_budget == 300_000_000
