"""Progress of long commands, and `tierstore serve` as a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.cli.conftest import ROOT, python, row, write_snapshot
from tests.extras import has_grpc
from tierstore.cli.progress import shown_progress
from tierstore.config import ENV_PREFIX
from tierstore.types import Progress


def test_progress_in_lines_says_each_phase_once_in_a_while(capfd: pytest.CaptureFixture[str]) -> None:
    with shown_progress("load") as report:
        for done in range(100):
            report(Progress("read", done, 100))
        report(Progress("warm"))
    assert capfd.readouterr().err.splitlines() == ["load: read 0 of 100", "load: warm"]


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
        with shown_progress("load") as report:
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
