"""The demo from end to end, small: a real service process, real traffic, deltas, a switch and a rollback."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from tierstore.demo import DemoReport, run
from tierstore.demo.graph import can_predict
from tierstore.demo.service import ServiceProcess
from tierstore.demo.shop import MODEL
from tierstore.demo.story import SERVERS, Story
from tierstore.errors import NotReady


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoReport, str, Path]:
    output = io.StringIO()
    directory = tmp_path_factory.mktemp("demo")
    report = run(seconds=4, scale=0.02, seed=11, workdir=directory, console=Console(file=output, width=120))
    return report, output.getvalue(), directory


def test_no_request_fails_and_every_answer_is_of_one_state_and_fresh(finished: tuple[DemoReport, str, Path]) -> None:
    report, _, _ = finished
    assert report.requests > 100
    assert (report.failed_requests, report.first_error) == (0, "")
    assert report.mixed_answers == 0
    assert report.stale_answers == 0
    assert report.versions_seen == [20261120, 20261121], "traffic must have seen both versions"


def test_every_row_read_back_is_the_trainers(finished: tuple[DemoReport, str, Path]) -> None:
    report, _, _ = finished
    assert report.rows_checked > 10_000
    assert report.mismatches == 0


def test_the_deltas_are_worth_it(finished: tuple[DemoReport, str, Path]) -> None:
    report, _, _ = finished
    assert report.quality is not None
    assert report.deltas == 8
    assert report.quality.new_item_share > 0.2
    assert report.quality.deltas > report.quality.daily + 0.01
    assert 0 < report.freshness_median_s <= report.freshness_p99_s <= report.freshness_max_s < 5


def test_the_service_scores_as_the_trainer_would_on_the_same_rows(finished: tuple[DemoReport, str, Path]) -> None:
    report, text, _ = finished
    if not can_predict():
        assert "it predicts where" in text
        pytest.skip("needs the extra `dense`")
    assert report.served_scores
    assert report.scores_checked > 1_000
    assert report.score_mismatches == 0
    assert "by the service" in text


def test_the_report_is_complete_as_a_document_and_for_a_person(finished: tuple[DemoReport, str, Path]) -> None:
    report, text, _ = finished
    assert report.ok
    document = json.loads(json.dumps(report.document()))
    assert document["ok"] is True
    assert document["load_rows_per_s"] > 0
    assert document["beside_rows_per_s"] > 0
    assert sum(document["tiers"].values()) == pytest.approx(1)
    assert {"host", "disk"} <= document["tiers"].keys()
    names = [window["name"] for window in document["windows"]]
    assert any("loading" in name for name in names)
    assert any("switching" in name for name in names)
    assert 0 < sum(server["requests"] for server in document["servers"]) <= document["requests"]
    assert "answered by" in text
    assert "0 mismatches of" in text
    assert "p99 ms" in text
    assert "\x1b" not in text, "no terminal, no colours"


def test_it_says_who_answers_before_and_after_the_loops_are_compiled() -> None:
    output, states = io.StringIO(), ["compiling", "compiling", "running", "running"]
    told = object.__new__(Story)
    told.servers, told.console = [], Console(file=output)
    told.tiers = SimpleNamespace(add=lambda model: {"host": 1.0})  # type: ignore[assignment]
    documents = iter([{"service": {"reactors": state}, "models": {MODEL: {}}} for state in states])
    told.client = SimpleNamespace(status=lambda: next(documents))  # type: ignore[assignment]
    assert [told._answers() for _ in states] == ["host 100%"] * 4
    assert tuple(name for name, _ in told.servers) == SERVERS
    assert output.getvalue().split() == f"from now on {SERVERS[1]} answer".split()


def running_in(directory: Path) -> list[str]:
    """Command lines of other processes with a path in `directory` among their arguments or in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            line = (process / "cmdline").read_bytes()
            if bytes(directory) in line + (process / "environ").read_bytes() and int(process.name) != os.getpid():
                found.append(line.decode())
    return found


def test_nothing_runs_afterwards(finished: tuple[DemoReport, str, Path]) -> None:
    _, _, directory = finished
    assert running_in(directory) == []
    assert multiprocessing.active_children() == []


@pytest.mark.thorough
def test_after_a_signal_in_the_middle_neither_processes_nor_files_remain(tmp_path: Path) -> None:
    story = "from tierstore.demo import run; run(seconds=9, scale=0.02)"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([sys.executable, "-c", story], stdout=subprocess.PIPE, text=True, env=environment) as demo:
        assert demo.stdout is not None
        finished = next((line for line in demo.stdout if "minute" in line), "")
        assert finished, "the deltas must have begun"
        assert len(running_in(tmp_path)) >= 3, "the demo, the service and the load generator"
        demo.terminate()
        demo.stdout.read()
        assert demo.wait(60) == 128 + signal.SIGTERM
    assert running_in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_service_that_does_not_start_is_reported_with_its_output(tmp_path: Path) -> None:
    with (
        ServiceProcess(tmp_path, port=0, host_budget="nonsense") as service,
        pytest.raises(NotReady, match=r"(?s)ended with.*host_budget"),
    ):
        service.url(timeout_s=60)


@pytest.mark.parametrize("wrong", [{"scale": 0}, {"seconds": -1}])
def test_a_scale_or_time_that_is_not_positive_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        run(**wrong)  # type: ignore[arg-type]
