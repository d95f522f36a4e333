"""What a control group allows is what there is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tierstore
from tierstore.config import Settings
from tierstore.config import memory as machine_memory
from tierstore.config.memory import decoding_bytes
from tierstore.machine import end_first, memory_bytes, processors

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


MIB = 1 << 20
PROCESS, HELPER = 350 * MIB, 150 * MIB  # as docs/settings.md says


def of_machine(monkeypatch: pytest.MonkeyPatch, memory: int, cores: int = 4) -> None:
    monkeypatch.setattr(machine_memory, "memory_bytes", lambda: memory)
    monkeypatch.setattr(machine_memory, "processors", lambda: cores)


@pytest.mark.parametrize("memory", [763 * MIB, 1 << 30, 3 << 29, 2 << 30, 4 << 30, 8 << 30, 64 << 30])
@pytest.mark.parametrize("cores", [1, 2, 64])
def test_the_budgets_of_all_defaults_fit_beside_the_process_and_its_helpers(
    tmp_path, monkeypatch, caplog, memory, cores
):
    of_machine(monkeypatch, memory, cores)
    settings = Settings(data=tmp_path)
    budgets = settings.host_budget + settings.overlay_budget + settings.load_memory
    budgets += decoding_bytes(settings.overlay_budget)
    assert PROCESS + settings.load_workers * HELPER + budgets <= memory
    assert budgets >= (memory - PROCESS - 4 * HELPER) // 2 or budgets > 5 << 30  # and they use it
    with tierstore.open(settings.data):
        assert "memory" not in caplog.text


def test_on_a_large_machine_the_defaults_are_those_of_the_page(tmp_path, monkeypatch):
    of_machine(monkeypatch, 64 << 30)
    settings = Settings(data=tmp_path)
    budgets = settings.host_budget, settings.overlay_budget, settings.load_memory, settings.load_workers
    assert budgets == (4 << 30, 256 * MIB, 512 * MIB, 4)


@pytest.mark.parametrize(
    ("given", "named"),
    [({"host_budget": "1900MiB"}, "host_budget"), ({"load_memory": "2GiB"}, "load_memory"),
     ({"overlay_budget": "2GiB"}, "overlay_budget"), ({"load_workers": 32}, "load_workers"),
     ({"max_inflight": "1GiB"}, "max_inflight"), ({"dense_memory": "1GiB"}, "dense_memory"),
     ({"overlay_budget": "350MiB"}, "overlay_budget")],
)  # fmt: skip
def test_a_start_says_which_budget_does_not_fit_and_which_would(tmp_path, monkeypatch, caplog, given, named):
    of_machine(monkeypatch, 2 << 30)
    with tierstore.open(tmp_path / "data", **given):
        budgets = ("host_budget", "overlay_budget", "load_memory", "load_workers", "max_inflight", "dense_memory")
        assert [name for name in budgets if name in caplog.text] == [named]
        assert "2.0 GiB" in caplog.text
        assert "fits" in caplog.text


def test_a_process_that_is_to_end_first_is_the_kernels_choice():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        own = Path("/proc/self/oom_score_adj").read_text()
        end_first(process.pid)
        assert Path(f"/proc/{process.pid}/oom_score_adj").read_text().strip() == "1000"
        assert Path("/proc/self/oom_score_adj").read_text() == own
        process.communicate()
    end_first(process.pid)  # of one that has ended: nothing
