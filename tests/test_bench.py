"""`tierstore bench` measures with a store of its own, whatever the environment says, and leaves nothing behind."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tierstore import bench
from tierstore.bench import Figure
from tierstore.cli.app import application
from tierstore.cli.bench import shown

ROWS = 20_000


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are there after three turns, right or not."""
    monkeypatch.setattr(bench, "_in_turn", partial(bench._in_turn, rounds=3))


@pytest.mark.usefixtures("few_rounds")
def test_each_figure_stands_beside_a_limit_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTORE_REMOTE", "redis://127.0.0.1:1")  # of another store, which is not to be touched
    monkeypatch.setenv("TIERSTORE_DATA", str(tmp_path / "data"))
    done = CliRunner().invoke(
        application(), ["bench", "--where", str(tmp_path), "--rows", str(ROWS), "--dtype", "int8", "--json"]
    )
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert (document["rows"], document["dim"], document["dtype"]) == (ROWS, 32, "int8")
    figures = document["figures"]
    assert [figure["name"].split(",")[0] for figure in figures] == [
        "load a snapshot",
        "look up 64 keys in process",
        "look up 4",
        "look up 64 keys over HTTP",
        "look up 1",
        "apply a delta of 1",
        "look up 512 keys in process",
    ]
    for figure in figures:
        assert figure["value"] > 0, figure
        assert 0 < figure["share"] < 100, figure
    assert document["notes"][0].startswith("20,000 rows of 32 numbers are 2.4 MiB, which the processor's caches")
    assert not list(tmp_path.iterdir())


def test_a_share_of_a_time_is_how_much_faster_the_limit_is() -> None:
    rate = Figure("", "rows/s", 2e6, 4e6, "")
    time = Figure("", "s", 200e-6, 50e-6, "")
    assert (rate.share, time.share) == (0.5, 0.25)
    assert [shown(rate.value, rate), shown(72_753.2, rate), shown(time.value, time), shown(0.0212, time)] == [
        "2.0 M rows/s",
        "72,753 rows/s",
        "200 µs",
        "21.20 ms",
    ]  # fmt: skip


def test_a_place_that_cannot_be_measured_is_named(tmp_path: Path) -> None:
    for command, what in (
        (["--where", str(tmp_path / "none")], "is no directory"),
        (["--where", str(tmp_path), "--rows", "1e12"], "ask for fewer rows"),
        (["--where", str(tmp_path), "--rows", "5"], "at least 10,000 rows, got 5"),
        (["--rows", "many"], "expected a number such as 10e9, got 'many'"),
        (["--dtype", "float8"], "expected float32, float16, bfloat16, int8, int4, got float8"),
        (["--url", "http://127.0.0.1:1"], "it measures this machine"),
    ):
        done = CliRunner().invoke(application(), ["bench", *command])
        assert done.exit_code, command
        assert what in " ".join(f"{done.output} {done.exception}".replace("│", "").split()), done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("few_rounds")
def test_the_notes_say_what_makes_the_store_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_LONG_FLUSH_S", 0.0)
    monkeypatch.setattr(bench, "_FEW_HUGE_PAGES", 2.0)
    report = bench.run(tmp_path, rows=ROWS, dim=4, note=lambda _: None)
    few, pages, flushes = report.notes[:3]
    assert f"{ROWS:,} rows" in few or f"{ROWS} rows" in few
    assert "huge pages" in pages
    assert "to flush a file" in flushes
