"""Compiled kernels are kept wherever there is room, and found where they are complete, written or not."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engine.scenes import eventually
from tests.mounts import bare, needs_mounts, read_only
from tierstore import kernels
from tierstore.ingest.helpers import NICENESS
from tierstore.kernels import ahead, carried

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


@pytest.mark.thorough
def test_beside_the_sources_first(folder: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    assert [kept(command), kept(command)] == [(folder / "__pycache__", 0), (folder / "__pycache__", 1)]
    place, hits = kept(command, bare(NUMBA_CACHE_DIR=str(folder.parent / "named")))
    assert (place.parent, hits) == (folder.parent / "named", 0)


@pytest.mark.thorough
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
    ahead.compile_all(2)
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


SOME_KERNELS = """
import sys
from tierstore import kernels
from tierstore.kernels import ahead, epochs
from tierstore.tiers.disk import bloom
if len(sys.argv) > 1:
    kernels.modules = lambda: []  # compile those of the modules above alone
    ahead.compile_share(int(sys.argv[1]), 1)
kernels.load()
print(sum(sum(entry.dispatcher.stats.cache_hits.values()) for entry in kernels.entries), len(kernels.entries))
"""


@pytest.fixture
def fresh(tmp_path: Path) -> dict[str, str]:
    """The environment of a copy of the package that has no compiled kernels."""
    shutil.copytree(ROOT / "tierstore", tmp_path / "fresh/tierstore", ignore=shutil.ignore_patterns("__pycache__"))
    return {**bare(), "XDG_CACHE_HOME": str(tmp_path / "cold"), "PYTHONPATH": str(tmp_path / "fresh")}


@pytest.mark.thorough
def test_what_was_compiled_before_a_kill_is_read_by_the_next_that_compiles(
    fresh: dict[str, str], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SOME_KERNELS]
    for _ in range(2):
        done = subprocess.run(
            [*command, "0"], capture_output=True, text=True, timeout=120, check=False, env=fresh, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
    hits, there = done.stdout.split()[-2:]
    assert hits == there


@pytest.mark.thorough
def test_kernels_that_the_package_carries_are_read_where_the_processor_has_their_features(
    fresh: dict[str, str], tmp_path: Path
) -> None:
    if (common := carried.COMMON.get(platform.machine())) is None:
        pytest.skip(f"no kernels are carried for {platform.machine()}")

    def hits(program: str, *words: str, **env: str) -> list[int]:
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            capture_output=True, text=True, timeout=120, env={**fresh, **env}, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [int(word) for word in done.stdout.split()[-2:]]

    named = {"NUMBA_CPU_NAME": common[0], "NUMBA_CPU_FEATURES": common[1]}
    hits(SOME_KERNELS.replace("kernels.load()", "kernels.set_complete(); kernels.load()"), "0", **named)
    package = tmp_path / "fresh/tierstore"
    (package / "kernels/__pycache__").rename(package / "compiled")
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (package / "compiled").iterdir())
    assert (found := hits(SOME_KERNELS))[0] == found[1] > 0
    lacking = f"""
import llvmlite.binding
features = llvmlite.binding.get_host_cpu_features
llvmlite.binding.get_host_cpu_features = lambda: type(features())({{**features(), {common[1].rpartition("+")[2]!r}: False}})
"""
    assert hits(lacking + SOME_KERNELS)[0] == 0, "compiled for the processor that is there"
    (package / "compiled" / next(name for name, _ in before if name.endswith(".nbc"))).write_bytes(b"")
    assert hits(SOME_KERNELS)[0] == found[0] - 1, "a damaged one is compiled, and not kept for other processors"
    after = sorted((path.name, path.stat().st_mtime_ns) for path in (package / "compiled").iterdir())
    assert [name for name, _ in after if name not in {name for name, _ in before}] == []


@pytest.mark.thorough
@needs_mounts
def test_damaged_and_missing_files_are_compiled_again_and_kept_where_they_can_be(
    fresh: dict[str, str], tmp_path: Path
) -> None:
    def hits(command: list[str], cwd: Path = tmp_path) -> int:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=fresh, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split()[-2])

    command = [sys.executable, "-c", SOME_KERNELS]
    assert hits([*command, "0"]) == 0
    cache = tmp_path / "fresh/tierstore/kernels/__pycache__"
    indexes, data = sorted(cache.glob("*.nbi")), sorted(cache.glob("*.nbc"))
    indexes[0].write_bytes(indexes[0].read_bytes()[:-5])
    data[1].write_bytes(b"")
    data[2].unlink()
    (cache / subprocess.run(
        [sys.executable, "-c", "from tierstore import kernels; print(kernels._mark(kernels._FOLDER, kernels.LAST))"],
        capture_output=True, text=True, timeout=120, check=True, env=fresh, cwd=tmp_path,
    ).stdout.strip()).touch()  # fmt: skip
    assert hits(read_only(command, None, tmp_path)) == len(data) - 3
    assert hits(command) == len(data) - 3
    assert hits(command) == len(data)


def test_a_place_that_another_may_write_to_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert not kernels._is_ours(tmp_path / "theirs") or os.stat(tmp_path).st_uid == 0
    monkeypatch.undo()
    assert kernels._is_ours(tmp_path / "theirs")
    (tmp_path / "theirs").chmod(0o777)
    assert not kernels._is_ours(tmp_path / "theirs")


@pytest.mark.parametrize("shares", [1, 2, 5])
def test_each_kernel_is_of_one_share_and_those_needed_first_come_first(shares: int) -> None:
    needs = [{i: 10 * i, 100 + i // 3: 500} for i in range(20)]
    when = [kernels.LAST, kernels.FIRST] * 10
    parts = [ahead._share(needs, when, share, shares) for share in range(shares)]
    assert sorted(i for part in parts for i in part) == list(range(20))
    for part in parts:
        assert [when[i] for i in part] == sorted(when[i] for i in part)
    loads = [sum({k: v for i in part for k, v in needs[i].items()}.values()) for part in parts]
    assert max(loads) < 2 * min(loads)


def test_kernels_that_call_the_same_functions_are_of_one_share() -> None:
    needs = [{1: 10, 9: 1000}, {2: 10, 9: 1000}, {3: 600}, {4: 500}]
    assert ahead._share(needs, [kernels.FIRST] * 4, 0, 2) == [0, 1]
    assert ahead._share(needs, [kernels.FIRST] * 4, 1, 2) == [2, 3]


def test_functions_that_a_kernel_calls_through_their_module_are_known() -> None:
    from tierstore.reactor import loop
    from tierstore.wire.http1 import head

    assert id(head.parse_at.py_func) in ahead._called(loop.serve, {})


def test_what_no_load_needs_is_compiled_at_the_priority_of_a_loads_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the load has waited for its kernels, at no lower priority than other work."""
    said = (
        "import sys; print('level 0', flush=True); sys.stdin.read(1); print('level 1', flush=True); sys.stdin.read(1)"
    )
    ours, theirs = os.pipe()

    def start_share(*_: object) -> subprocess.Popen[bytes]:
        out = {"stdin": ours, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([sys.executable, "-c", said], 0, **out)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(ahead, "start_share", start_share)
    monkeypatch.setattr(kernels, "set_complete", lambda *_: None)
    monkeypatch.setattr(kernels, "load", lambda *_: None)
    monkeypatch.setattr(kernels, "awaited", False)
    compilation = ahead.Compilation(1, lambda _: None, nice=10)
    compilation.nice = 0  # as `prepare` sets it
    assert compilation.first.wait(30)
    (process,) = compilation._running
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0)
    os.write(theirs, b"1")
    assert compilation.soon.wait(30)
    eventually(lambda: os.getpriority(os.PRIO_PROCESS, process.pid) == NICENESS, "it gives way")
    os.write(theirs, b"2")
    assert compilation.done.wait(30)
    os.close(ours)
    os.close(theirs)


def children_of(process: int) -> list[str]:
    """Of all of its threads."""
    return [child for task in Path(f"/proc/{process}/task").glob("*/children") for child in task.read_text().split()]


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
            while not (children := children_of(service.pid)):
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


def test_kernels_are_compiled_where_this_process_imports_them_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the working directory: in a clone, and while an image is built, another copy of the package lies there."""
    (tmp_path / "tierstore").mkdir()
    (tmp_path / "tierstore" / "__init__.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)
    stdin, ours = os.pipe()
    try:
        process = ahead.start_share(999, 1000, stdin)  # so many that nothing is left for the last
        out, error = process.communicate(timeout=120)
    finally:
        os.close(stdin)
        os.close(ours)
    assert (process.returncode, out) == (0, b"total 0\nlevel 0\nlevel 1\nlevel 2\nlevel 3\n"), error.decode()
