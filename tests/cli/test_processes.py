"""Progress of long commands, and `tierstore serve` as a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tierstore
from tests.cli.conftest import ROOT, Cli, python, row, write_snapshot
from tests.extras import has_grpc
from tierstore.cli import imports, progress
from tierstore.cli.progress import shown_progress
from tierstore.config import ENV_PREFIX
from tierstore.engine.store import Store
from tierstore.errors import LoadCancelled
from tierstore.kernels import ahead
from tierstore.service.server import ServerThread
from tierstore.types import Progress


def test_progress_in_lines_advances_and_says_each_phases_end(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock moves by a second whenever it is read."""
    clock = iter(range(100))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    with shown_progress("load", "nothing is loaded") as report:
        for done in range(0, 50, 10):
            report(Progress("read", done, 50, "the storage" if done == 0 else None))
        report(Progress("warm"))
    assert capfd.readouterr().err.splitlines() == [
        "load: read, waits: the storage …",
        "load: read 30 of 50, 10 a second, 2.0 s left",
        "load: read 40 done in 6.0 s, 7 a second",
        "load: warm …",
        "load: warm done in 2.0 s",
    ]


@pytest.mark.parametrize(
    ("words", "phase", "says"),
    [
        (["import", "items", "--model", "m", "--table", "t", "--out", "o/m/1"], "import", "there is no new version"),
        (["import", "items", "--model", "m", "--table", "t", "--data", "d/d"], "write", "there is no new version"),
        (["load", "s/ctr-1", "--data", "d/d"], "read", "the same command goes on"),
        (["build", "s/ctr-1", "o/b"], "read", "the same command goes on"),
        (["backup", "ctr", "o/b", "--data", "old"], "image", "there is no new backup"),
        (["compile", "--data", "d"], "compile kernels", "those that are compiled are kept"),
    ],
)
def test_ctrl_c_says_what_becomes_of_the_work_and_leaves_nothing_empty(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], phase: str, says: str
) -> None:
    """The signal comes when the phase is reported first."""
    (tmp_path / "s").mkdir()
    (tmp_path / "items").mkdir()
    write_snapshot(tmp_path / "s", 1)
    rows = {"key": np.arange(500), "vector": list(np.zeros((500, 4), np.float32))}
    pq.write_table(pa.table(rows), tmp_path / "items/part-0.parquet")
    if words[0] == "backup":
        cli("load", "s/ctr-1", "--data", "old")

    def compile_all(_: int, __: object, report: Callable[[int, int], None], ___: object) -> float:
        report(1, 9)
        raise AssertionError("goes on")

    def write(lines: object, progress: Progress, text: str) -> None:
        sys.stderr.write(progress.phase + text)
        if progress.phase == phase:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ahead, "compile_all", compile_all)
    monkeypatch.setattr(progress._Lines, "_write", write)
    before = {path for path in tmp_path.rglob("*") if path.is_dir()}
    run = cli(*words)
    assert run.code == 130
    assert f"tierstore: {'compile kernels' if words[0] == 'compile' else words[0]}: interrupted; " in run.err
    assert says in run.err
    assert "Traceback" not in run.err
    made = [path for path in tmp_path.rglob("*") if path.is_dir() and path not in before]
    assert [path for path in made if not any(path.iterdir())] == []
    assert (made == []) == (words[0] != "backup")


def test_timings_of_kernels_are_shown_dearest_first(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_all(_: int, __: object, ___: object, timings: dict[str, float]) -> float:
        timings |= {"pool.pool": 1.5, "reactor.serve": 12.25}
        return 8.0

    monkeypatch.setattr(ahead, "compile_all", compile_all)
    lines = cli("compile", "--timings").out.splitlines()
    assert lines[:2] == ["  12.25 s  reactor.serve", "   1.50 s  pool.pool"]
    assert lines[2].startswith("kernels are compiled in 8.0 s: ")
    assert list(cli("compile", "--timings", "--json").document["timings"]) == ["reactor.serve", "pool.pool"]
    assert len(cli("compile").out.splitlines()) == 1


def test_ctrl_c_beside_a_service_says_that_it_goes_on(
    cli: Cli, loaded: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress._Lines, "report", lambda *_: signal.raise_signal(signal.SIGINT))
    with ServerThread(loaded) as server:
        run = cli("load", loaded.settings.data.parent / "ctr-1", "--url", server.url)
    assert run.code == 130
    assert "`tierstore jobs` shows it" in run.err


@pytest.mark.parametrize("ends", ["stopped", "switched", "kept", "left"])
def test_ctrl_c_of_an_import_into_a_service_waits_for_the_end_of_its_load_and_says_it(
    cli: Cli, loaded: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """The load waits until it is cancelled, and then is stopped, goes on to its end, or fails in the switch."""
    before, number = loaded.model("ctr").active_version, 71 + ["stopped", "switched", "kept", "left"].index(ends)
    (tmp_path / "items").mkdir()
    pq.write_table(
        pa.table({"key": [1, 2], "vector": list(np.zeros((2, 4), np.float32))}), tmp_path / "items/a.parquet"
    )
    monkeypatch.chdir(tmp_path)
    load, was_there, may_end = loaded.load_snapshot, [], threading.Event()

    def load_snapshot(source: Path, *, progress: Callable[[Progress], None], **options: Any) -> int:
        progress(Progress("asked", 1, 9))
        cancelled = options.pop("cancelled")
        assert cancelled.wait(60)
        assert ends != "left" or may_end.wait(60)
        was_there.append(Path(source).is_dir())
        if ends == "switched":
            return load(source, progress=progress, **options)
        if ends == "kept":
            load(source, progress=progress, **options | {"activate": False})
            raise LoadCancelled("the load was cancelled")
        return load(source, progress=progress, cancelled=cancelled, **options)

    def report(_: object, now: Progress) -> None:
        if now.phase == "asked":
            signal.raise_signal(signal.SIGINT)

    real_sleep = time.sleep

    def sleep(seconds: float) -> None:
        if ends == "left" and threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        real_sleep(seconds)

    monkeypatch.setattr(loaded, "load_snapshot", load_snapshot)
    monkeypatch.setattr(progress._Lines, "report", report)
    monkeypatch.setattr(imports, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    with ServerThread(loaded) as server:
        words = [
            "--model",
            "ctr",
            "--table",
            "item",
            "--feature",
            "item_id",
            "--version",
            str(number),
            "--delta-seq",
            "10",
        ]
        run = cli("import", "items", *words, "--url", server.url)
        left = list(loaded.settings.data.parent.glob(".tmp-import-*"))
        serves = loaded.model("ctr").active_version
        may_end.set()
    kept = number in loaded.model("ctr").versions
    if serves != before:
        loaded.rollback("ctr")
    if kept:
        loaded.drop("ctr", number)
    assert run.code == 130
    assert was_there == [True]
    assert (serves == number) == (ends == "switched")
    assert bool(left) == (ends == "left")
    assert kept == (ends in ("switched", "kept"))
    assert loaded.model("ctr").problems() == {}
    said = {
        "stopped": "there is no new version", "switched": f"ctr serves version {number}", "kept": "is loaded and kept",
        "left": "may still load",
    }  # fmt: skip
    assert {end for end, words in said.items() if words in run.err} == {ends}


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    shown = bytearray()

    def read() -> None:
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # how a terminal says that its other end was closed
                return
            if not part:
                return
            shown.extend(part)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm-256color")
        with shown_progress("load", "nothing is loaded") as report:
            report(Progress("read", 50, 100))
    reader.join(10)
    os.close(ours)
    assert b"load: read" in shown
    assert b"50/100" in shown


def test_serve_says_where_it_listens_and_ends_in_order(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path, 1)
    (tmp_path / "tierstore.toml").write_text('host_budget = "4MiB"\nload_workers = 1\nport = 1\n')
    environment = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
    environment |= {"TIERSTORE_PORT": "2", "TIERSTORE_DRAIN_S": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tierstore", "serve", "--port", "0", "--data", "d"]
    with (tmp_path / "err").open("w") as err:
        service = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=err, text=True
        )
    try:
        assert service.stdout is not None
        line = service.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, (line, (tmp_path / "err").read_text())
        if has_grpc():
            assert re.fullmatch(r"gRPC at 127\.0\.0\.1:\d+\n", service.stdout.readline())
        with tierstore.Client(found.group()) as client:
            assert client.ready()
            assert client.load_snapshot(snapshot) == 1
            np.testing.assert_array_equal(client.lookup("ctr", "item_id", [5]), np.array([row(1, 5)], np.float32))
        held = python("-m", "tierstore", "status", "--data", str(tmp_path / "d"))
        assert held.returncode == 1
        assert "--url" in held.stderr
        service.send_signal(signal.SIGTERM)
        assert service.wait(60) == 0
    finally:
        service.kill()
        service.wait()
    assert "Traceback" not in (tmp_path / "err").read_text()
