"""The demo from end to end, small: a real service process, real traffic, deltas, a switch and a rollback."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from tierstore.demo import DemoReport, run
from tierstore.demo.process import Child, service_url, start_service
from tierstore.errors import NotReady


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoReport, str, Path]:
    output = io.StringIO()
    directory = tmp_path_factory.mktemp("demo")
    report = run(seconds=4, scale=0.02, seed=11, workdir=directory, console=Console(file=output, width=120))
    return report, output.getvalue(), directory


def test_no_request_fails_and_every_answer_is_of_one_state_and_fresh(told: tuple[DemoReport, str, Path]) -> None:
    report, _, _ = told
    assert report.requests > 100
    assert (report.failed_requests, report.first_error) == (0, "")
    assert report.mixed_answers == 0
    assert report.stale_answers == 0
    assert report.versions_seen == [20261120, 20261121], "traffic must have seen both versions"


def test_every_row_read_back_is_the_trainers(told: tuple[DemoReport, str, Path]) -> None:
    report, _, _ = told
    assert report.rows_checked > 10_000
    assert report.mismatches == 0


def test_the_deltas_are_worth_it(told: tuple[DemoReport, str, Path]) -> None:
    report, _, _ = told
    assert report.quality is not None
    assert report.deltas == 5
    assert report.quality.new_item_share > 0.2
    assert report.quality.deltas > report.quality.daily + 0.01
    assert 0 < report.freshness_median_s <= report.freshness_p99_s <= report.freshness_max_s < 5


def test_the_report_is_complete_as_a_document_and_for_a_person(told: tuple[DemoReport, str, Path]) -> None:
    report, text, _ = told
    assert report.ok
    document = json.loads(json.dumps(report.document()))
    assert document["ok"] is True
    assert document["load_rows_per_s"] > 0
    assert document["beside_rows_per_s"] > 0
    assert sum(document["tiers"].values()) == pytest.approx(1)
    assert {"host", "disk"} <= document["tiers"].keys()
    names = [window["name"] for window in document["windows"]]
    assert any("loading" in name for name in names)
    assert any("switched" in name for name in names)
    assert "0 mismatches of" in text
    assert "p99 ms" in text
    assert "\x1b" not in text, "no terminal, no colours"


def test_nothing_is_left_running(told: tuple[DemoReport, str, Path]) -> None:
    _, _, directory = told
    ours = str(directory).encode()
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                assert ours not in (process / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue


def test_a_service_that_does_not_come_up_is_told_with_its_own_words(tmp_path: Path) -> None:
    with (
        start_service(tmp_path, port=0, host_budget="nonsense") as child,
        pytest.raises(NotReady, match=r"(?s)ended with.*host_budget"),
    ):
        service_url(child, timeout_s=60)


def test_a_child_that_ignores_nothing_is_stopped_by_its_own_id(tmp_path: Path) -> None:
    with Child("sleeper", ["timeit", "-n", "1", "-r", "1", "import time; time.sleep(600)"], tmp_path) as child:
        assert child.process.poll() is None
    assert child.process.returncode == -15


@pytest.mark.parametrize("wrong", [{"scale": 0}, {"seconds": -1}])
def test_a_scale_or_time_that_is_not_positive_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        run(**wrong)  # type: ignore[arg-type]
