"""What commands say of caches: the hottest keys, hit rates at other sizes, and a plan by those of a running service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.cli.conftest import DIM, ROWS, SMALL, Cli, write_snapshot
from tierstore.cli import show
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread


@pytest.fixture(scope="module")
def url(loaded: Store) -> Iterator[str]:
    """A service after look-ups: of all keys, and as often of key 7 alone."""
    loaded.shared.sampler.close()
    keys, random = np.concatenate([np.arange(ROWS), np.full(ROWS, 7)]), np.random.default_rng(1)
    for turn in range(200):
        loaded.shared.sampler.step(60.0 * turn / 100)
        loaded.model("ctr").lookup("item_id", random.permutation(keys))
    loaded.shared.sampler.step(180.0)
    with ServerThread(loaded) as server:
        yield server.url


def test_the_hottest_keys(cli: Cli, url: str) -> None:
    entries = cli("hot", "ctr", "item", "-n", 3, "--url", url, "--json").document["hottest"]
    assert entries[0] == {"key": 7, "share": pytest.approx(0.5, abs=0.03)}
    assert [round(entry["share"], 3) for entry in entries[1:]] == [pytest.approx(0.5 / ROWS, abs=0.002)] * 2
    lines = cli("hot", "ctr", "item", "--url", url).out.splitlines()
    assert lines[1].split()[0] == "7"
    assert any(line.split()[:2] == ["2", "times"] for line in lines)
    assert any("UTC" in line and line.rstrip().endswith("100.00%") for line in lines)
    assert "nothing was looked up yet" in cli("hot", "ctr", "word", "--url", url).out


def test_hot_says_what_it_counts_over(cli: Cli, tmp_path: Path) -> None:
    with tierstore.open(tmp_path / "data", port=0, **SMALL) as store, ServerThread(store) as server:
        for version in (1, 2):
            store.load_snapshot(write_snapshot(tmp_path, version))
        store.shared.sampler.close()
        step, look_up = store.shared.sampler.step, store.model("ctr").lookup

        def text() -> str:
            return cli("hot", "ctr", "item", "--url", server.url).out

        for turn in range(20):
            step(600.0 + turn)
            look_up("item_id", np.arange(ROWS))
        step(660.0)
        assert "counts go on" not in text(), "one version in all that is counted"
        store.activate("ctr", 1)
        assert "version 1 serves for less than a minute; counts go on over a switch" in text()
        step(720.0)
        assert "version 1 serves since the minute until 00:12 UTC; counts go on" in text()
    with tierstore.open(tmp_path / "data", port=0, **SMALL) as store, ServerThread(store) as server:
        assert "nothing was counted since the start: these keys were hot" in cli("hot", "ctr", "item", "--url", server.url).out  # fmt: skip


def test_a_table_that_is_not_there(cli: Cli, url: str) -> None:
    done = cli("hot", "ctr", "nothing", "--url", url)
    assert (done.code, "item, word" in done.err) == (1, True)


def test_status_says_what_other_memory_would_do(cli: Cli, url: str) -> None:
    text = cli("status", "--url", url).out
    assert "item: about 100.0% from memory, with half of it" in text
    curve = [(0.5, 0.78), (1.0, 0.831), (2.0, 0.862)]
    cache: dict[str, Any] = {"curve": [{"scale": scale, "hit_rate": rate} for scale, rate in curve]}
    says = "about 83.1% from memory, with half of it 5.1 points less, with twice 3.1 points more"
    assert show.memory_line(cache) == says
    assert show.memory_line({"curve": [{"scale": 1.0, "hit_rate": None}]}) == ""


def test_a_plan_by_what_a_service_measures(cli: Cli, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.cli.plan.SAMPLE_S", 0.1)
    place = ("--from", url, "--table", "ctr/item")
    made = cli("plan", *place, "--html", "page.html", "--json").document
    beside = {one["what"]: one for one in made["compared"]}
    assert beside["hit rate"]["measured"] > 0
    assert beside["memory of a row in memory"]["measured"] > DIM
    assert beside["disk of a row"]["measured"] > 0
    assert beside["processor of a request"]["measured"] is None, "nobody asked meanwhile"
    assert "as it is served now" in cli("plan", *place).out
    assert "Sizing of ctr/item" in (tmp_path / "page.html").read_text()
    assert (made["load"]["rows"], made["load"]["dim"]) == (ROWS, DIM)
    assert made["load"]["reuse"] == "as ctr/item is looked up now"
    wider = cli(
        "plan", *place, "--rows", "1e9", "--dim", 64, "--dtype", "float16", "--memory", "2GiB", "--json"
    ).document
    assert (wider["load"]["rows"], wider["load"]["dim"], wider["load"]["dtype"]) == (1e9, 64, "float16")
    small, large = (
        cli("plan", *place, "--rows", "1e9", "--memory", memory, "--json").document["designs"][0]["node"]["hit_rate"]
        for memory in ("12GiB", "24GiB")
    )
    assert 0 < small < large < 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--dim", "4"], "--rows and --dim, or --from"),
        (["--from", "URL"], "expected MODEL/TABLE"),
        (["--from", "URL", "--table", "ctr/item", "--zipf", "1"], "got two"),
        (["--from", "URL", "--table", "ctr/nothing"], "item, word"),
        (
            ["--from", "URL", "--table", "ctr/word"],
            "(16 for each row that the cache has room for), and 0 were looked up so far",
        ),
    ],
)
def test_a_plan_that_cannot_be_made(cli: Cli, url: str, words: list[str], says: str) -> None:
    done = cli("plan", *(url if word == "URL" else word for word in words))
    assert done.code != 0
    assert says in " ".join(done.err.replace("│", " ").split())
