"""Compiled kernels are kept wherever there is room, and found where they are complete, written or not."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tierstore import kernels
from tierstore.kernels import ahead

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, sys
from pathlib import Path
from tierstore import kernels
folder = Path(sys.argv[1])
if len(sys.argv) > 2:
    kernels.use_data(Path(sys.argv[2]))
kernels.stamp_caches(folder)
sys.path.insert(0, str(folder))
import kernel
print(json.dumps([str(kernels.directory(folder)), sum(kernel.answer.stats.cache_hits.values())]))
"""
KERNEL = "from numba import njit\n@njit('int64()', cache=True)\ndef answer():\n    return 42\n"


def can_mount() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode == 0


needs_mounts = pytest.mark.skipif(
    shutil.which("unshare") is None or not can_mount(), reason="mount namespaces are not to be had here"
)


def read_only(command: list[str], but: Path | None, cwd: Path) -> list[str]:
    """The command that runs `command` where all file systems are read-only, `but` one directory."""
    steps = [] if but is None else [f"mount --bind {but} {but}"]
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    kept = ("/proc", "/sys", "/dev")
    steps += [f"mount -o remount,bind,ro {m} 2>/dev/null || true" for m in mounts if not m.startswith(kept)]
    steps += [] if but is None else [f"mount -o remount,bind,rw {but}"]
    steps += [
        "mount -o remount,bind,ro /dev/shm 2>/dev/null || true",
        f"cd {but or cwd}",
        shlex.join(["exec", *command]),
    ]
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", "; ".join(steps)]


def bare(**more: str) -> dict[str, str]:
    """An environment without HOME."""
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "kernel.py").write_text(KERNEL)
    return tmp_path / "some"


def kept(command: list[str], env: dict[str, str] | None = None, cwd: Path | None = None) -> tuple[Path, int]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env or bare(), cwd=cwd)
    assert done.returncode == 0, done.stderr
    place, hits = json.loads(done.stdout)
    return Path(place), hits


def test_beside_the_sources_first(folder: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    assert [kept(command), kept(command)] == [(folder / "__pycache__", 0), (folder / "__pycache__", 1)]
    place, hits = kept(command, bare(NUMBA_CACHE_DIR=str(folder.parent / "named")))
    assert (place.parent, hits) == (folder.parent / "named", 0)


@needs_mounts
def test_in_the_data_directory_where_nothing_else_can_be_written(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    command = read_only([sys.executable, "-c", PROGRAM, str(folder), str(data)], data, tmp_path)
    (place, hits), again = kept(command), kept(command)
    assert (place.parent, hits) == (data / "kernels", 0)
    assert again == (place, 1)


@needs_mounts
def test_nowhere_is_an_error_that_names_the_way_out(folder: Path, tmp_path: Path) -> None:
    command = read_only([sys.executable, "-c", PROGRAM, str(folder)], None, tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=bare())
    assert done.returncode == 1
    assert "compiled kernels need a directory that can be written" in done.stderr
    assert "NUMBA_CACHE_DIR" in done.stderr


@needs_mounts
def test_compiled_ones_need_no_place_to_be_written(tmp_path: Path) -> None:
    """As in an image that was built with `tierstore compile`: nothing is compiled, and nothing written."""
    ahead.prepare()
    data = tmp_path / "data"
    data.mkdir()
    command = [sys.executable, "-m", "tierstore", "compile", "--json", "--data", "."]
    named = {name: os.environ[name] for name in ("NUMBA_CACHE_DIR", "HOME", "XDG_CACHE_HOME") if name in os.environ}
    done = subprocess.run(
        read_only(command, data, tmp_path), capture_output=True, text=True, timeout=120, check=False, env=bare(**named)
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"directory": str(kernels.directory()), "seconds": 0.0}
    assert list(data.iterdir()) == []


def test_a_place_that_another_may_write_to_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert not kernels._is_ours(tmp_path / "theirs") or os.stat(tmp_path).st_uid == 0
    monkeypatch.undo()
    assert kernels._is_ours(tmp_path / "theirs")
    (tmp_path / "theirs").chmod(0o777)
    assert not kernels._is_ours(tmp_path / "theirs")


@pytest.mark.parametrize("shares", [1, 2, 5])
def test_each_kernel_is_of_one_share(shares: int) -> None:
    needs = [{i: 10 * i, 100 + i // 3: 500} for i in range(20)]
    parts = [ahead._share(needs, share, shares) for share in range(shares)]
    assert sorted(i for part in parts for i in part) == list(range(20))
    loads = [sum({k: v for i in part for k, v in needs[i].items()}.values()) for part in parts]
    assert max(loads) < 2 * min(loads)


def test_serve_says_that_it_compiles_and_ends_at_once_when_it_is_told_to(tmp_path: Path) -> None:
    """A first process of a container has no default for SIGTERM, and compiling takes longer than its grace may be."""
    shutil.copytree(ROOT / "tierstore", tmp_path / "fresh/tierstore", ignore=shutil.ignore_patterns("__pycache__"))
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cold"), "PYTHONPATH": str(tmp_path / "fresh")}
    env.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, "-m", "tierstore", "serve", "--port", "0", "--data", "data"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as service:
        assert service.stderr is not None
        try:
            line = service.stderr.readline()
            assert "compiling kernels with" in line
            deadline = time.monotonic() + 30
            while not (children := Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text().split()):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            service.send_signal(signal.SIGTERM)
            assert service.wait(30) == 128 + signal.SIGTERM
        finally:
            service.kill()
        assert "Traceback" not in service.stderr.read()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "its processes are gone with it"
        time.sleep(0.01)
