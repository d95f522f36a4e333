"""`tierstore rollout`, `status` of several services, and `plan`, as commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.cli.conftest import DIM, SMALL, Cli, write_delta, write_snapshot
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread

Two = tuple[list[Store], list[str]]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    with ExitStack() as stack:
        stores = [
            stack.enter_context(
                tierstore.open(tmp_path / f"n{number}", port=0, grpc_port="off", source_root=[tmp_path], **SMALL)  # type: ignore[arg-type]
            )
            for number in range(2)
        ]
        yield stores, [stack.enter_context(ServerThread(store)).url for store in stores]


def both(urls: list[str]) -> list[str]:
    return [word for url in urls for word in ("--url", url)]


def test_jobs_of_a_service_are_listed_and_stopped(two: Two, cli: Cli, tmp_path: Path) -> None:
    _, urls = two
    assert cli("jobs", "--url", urls[0]).out.startswith("no job is running")
    assert "only a running service has jobs" in cli("jobs").err
    assert cli("load", write_snapshot(tmp_path, 1), "--url", urls[0]).code == 0
    listed = cli("jobs", "--url", urls[0])
    assert all(word in listed.out for word in ("load", "ctr", "done"))
    (job,) = cli("jobs", "--url", urls[0], "--json").document
    assert (job["kind"], job["state"], job["version"]) == ("load", "done", 1)
    ended = cli("jobs", "--url", urls[0], "--cancel", job["job"])
    assert ended.code == 1
    assert "has ended: done" in ended.err
    assert "has not failed" in cli("jobs", "--url", urls[0], "--acknowledge", job["job"]).err
    assert cli("load", tmp_path / "ctr-1", "--url", urls[0]).code == 1, "it is there already"
    assert "load_failed" in cli("status", "--url", urls[0]).out
    failed, _ = cli("jobs", "--url", urls[0], "--json").document
    assert cli("jobs", "--url", urls[0], "--acknowledge", failed["job"]).code == 0
    assert "load_failed" not in cli("status", "--url", urls[0]).out


def test_a_rollout_and_a_comparison(two: Two, cli: Cli, tmp_path: Path) -> None:
    (first, second), urls = two
    options = ["--nodes", ",".join(urls), "--check", "0s", "--max-wait", "1m"]
    run = cli("rollout", write_snapshot(tmp_path, 1), *options)
    assert run.code == 0, run.err
    assert run.out.startswith("ctr version 1 serves on 2 nodes; 2 of 2 nodes were switched")
    assert f"{urls[0]}: version 1 is loaded" in run.err
    again = cli("rollout", tmp_path / "ctr-1", *options, "--policy", "all-at-once", "--json")
    assert (again.document["switched"], again.document["seq"]) == ([], 10)

    tried = cli("rollout", write_snapshot(tmp_path, 2), *options, "--canary", "5%", "--for", "0s")
    assert tried.code == 0, tried.err
    assert "version 2 gets 0.05 of the requests on 2 nodes" in tried.err

    same = cli("status", *both(urls))
    assert same.code == 0
    assert "2 nodes serve the same" in same.out
    assert "sampled rows were compared at seq 10" in same.out
    document = cli("status", "ctr", "--json", *both(urls)).document
    assert (document["equal"], document["models"]["ctr"]["rows"]["seq"]) == (True, 10)

    first.apply_delta(write_delta(tmp_path, 11, 3))
    (tmp_path / "other").mkdir()
    second.apply_delta(write_delta(tmp_path / "other", 11, 4))
    differ = cli("status", *both(urls))
    assert differ.code == 1
    assert "problem: rows of table 'item' differ at seq 11" in differ.out


def test_a_rollout_that_fails_says_where_and_ends_with_a_code(
    two: Two, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, second), urls = two
    options = ["--nodes", ",".join(urls), "--check", "0", "--max-wait", "60s"]
    assert cli("rollout", write_snapshot(tmp_path, 1), *options).code == 0
    snapshot = write_snapshot(tmp_path, 2)

    def no(*_: object, **__: object) -> None:
        raise tierstore.Conflict("not today")

    monkeypatch.setattr(second, "activate", no)
    run = cli("rollout", snapshot, *options, "--json")
    assert run.code == 1
    assert run.document["restored"] is True
    assert f"{urls[1]}: not today" in run.err
    assert "every node serves what it did before" in run.err
    assert [store.model("ctr").active_version for store in (first, second)] == [1, 1]

    monkeypatch.setattr(first, "rollback", no)
    run = cli("rollout", snapshot, *options)
    assert run.code == 3
    assert "NOT every node serves what it did before" in run.err


def test_wrong_use(cli: Cli, tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path, 1)
    assert cli("rollout", snapshot).code == 2
    assert "expected a time such as 90s" in cli("rollout", snapshot, "--nodes", "http://a", "--check", "soon").err
    assert "each node once" in cli("rollout", snapshot, "--nodes", "http://a,http://a").err
    assert "expected --data or --url" in cli("status", "--data", ".", "--url", "http://a", "--url", "http://b").err
    away = cli("status", "--url", "http://127.0.0.1:1", "--url", "http://127.0.0.1:2", "--json")
    assert away.code == 1
    assert len(away.document["unreachable"]) == 2


def test_every_row_of_two_nodes_is_compared_and_the_keys_that_differ_are_named(
    two: Two, cli: Cli, tmp_path: Path
) -> None:
    (first, second), urls = two
    snapshot = write_snapshot(tmp_path, 1)
    for store in (first, second):
        store.load_snapshot(snapshot)
    words = ["verify", "--url", urls[0], "--against", urls[1]]
    equal = cli(*words)
    assert (equal.code, equal.out.splitlines()) == (
        0, ["ctr version 1 at seq 10: 302 rows of each node compared", "all is equal"]
    )  # fmt: skip
    for store, value in ((first, 1.0), (second, 2.0)):
        with tierstore.DeltaWriter(tmp_path / "11.arrow", model="ctr", seq=11) as delta:
            delta.upsert("item", [7], np.full((1, DIM), value, np.float32))
            delta.upsert("word", ["only here"] if store is first else ["b"], np.ones((1, 2), np.float32))
            delta.delete("item", [8] if store is first else [9])
        store.apply_delta(tmp_path / "11.arrow")
    differ = cli(*words)
    assert differ.code == 1
    lines = differ.out.splitlines()
    assert "ctr version 1 at seq 11: 302 rows of each node compared" in lines
    assert f"table item (299 on {urls[0]}, 299 on {urls[1]}): 3 keys differ" in lines
    assert {"  7: another row", f"  8: only on {urls[1]}", f"  9: only on {urls[0]}"} <= set(lines)
    assert f"table word (3 on {urls[0]}, 2 on {urls[1]}): 1 keys differ" in lines
    assert lines[-3:] == [
        "problem: ctr: rows of table 'item' differ at seq 11",
        "problem: ctr: rows of table 'word' differ at seq 11",
        "2 problems",
    ]
    document = cli(*words, "--json").document
    (word,) = document["models"][0]["tables"]["word"]["differing"]
    assert (word["on"], len(word["key"])) == ([urls[0]], 16), "the hash of a string, as strings are not kept"
    second.load_snapshot(write_snapshot(tmp_path, 2))
    assert f"expected one version on every node, got 1 on {urls[0]}, 2 on {urls[1]}" in cli(*words).out
    for store in (first, second):
        store.deactivate("ctr")
    nothing = cli(*words)
    assert (nothing.code, "nothing was compared: neither" in nothing.out) == (1, True)
    assert "--url goes with --against" in cli("verify", "--url", urls[0]).err
    assert "expected another node" in cli("verify", "--url", urls[0], "--against", urls[0]).err


def test_a_data_directory_is_compared_with_a_node(two: Two, cli: Cli, tmp_path: Path) -> None:
    (first, _), urls = two
    with tierstore.open(tmp_path / "mine", **SMALL) as store:  # type: ignore[arg-type]
        store.load_snapshot(write_snapshot(tmp_path, 1))
    done = cli("verify", "--data", tmp_path / "mine", "--against", urls[0])
    assert (done.code, done.out) == (1, f"problem: {urls[0]} has no model 'ctr'\n1 problems\n")
    first.load_snapshot(tmp_path / "ctr-1")
    assert cli("verify", "--data", tmp_path / "mine", "--against", urls[0]).out.endswith("all is equal\n")


def test_a_plan(cli: Cli, tmp_path: Path) -> None:
    words = ["plan", "--rows", "10e9", "--dim", "32", "--dtype", "float16", "--qps", "20000"]
    run = cli(*words)
    assert run.code == 0, run.err
    assert "10,000,000,000 rows of 32 float16: 64 bytes each" in run.out
    assert "one machine: not possible, disk" in run.out
    document = cli(*words, "--zipf", "1.1", "--nodes", "4", "--json").document
    assert document["load"]["reuse"] == "Zipf 1.1"
    assert [design["nodes"] for design in document["designs"]] == [4, 4, 4, 4]
    (tmp_path / "p.toml").write_text('currency = "EUR"\nmemory = 3\n')
    small = cli("plan", "--rows", "1e6", "--dim", "16", "--memory", "8GiB")
    assert "chosen: one machine" in small.out
    assert "38.4 MiB a version" in small.out
    assert "49.9 MiB a version" in cli("plan", "--rows", "1e6", "--dim", "16", "--memory", "8GiB", "--expires").out
    assert "USD a month" in small.out
    assert (
        "assumed      no requests (--qps), 1,000 keys a request (--keys), keys as uneven as of ads models" in small.out
    )
    assert "1,000,000 (100.00%)" in small.out
    assert "200.00%" not in small.out, "rows that a machine has twice are not twice as many"
    assert "takes about 3 s a node" in small.out
    assert "\nassumed" not in cli("plan", "--rows", "1e9", "--dim", "32", "--qps", "9", "--keys", "9", "--zipf", "1", "--prices", "p.toml").out  # fmt: skip
    assert "host_budget: memory for rows." in small.out
    assert cli("plan", "--rows", "1e12", "--dim", "64", "--memory", "1GiB").code == 1
    (tmp_path / "reuse.csv").write_text("rows,look-ups\n1,9\n9,1\n")
    assert "reuse.csv" in cli("plan", "--rows", "1e6", "--dim", "16", "--reuse", "reuse.csv").out


def test_a_plan_that_grows_with_prices_of_kinds_of_nodes_as_a_page(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text(
        'currency = "EUR"\n[nodes.r8]\nmemory = "64GiB"\ndisk = "2TiB"\ncores = 8\nprice = 300\n'
        '[nodes.r64]\nmemory = "512GiB"\ndisk = "8TiB"\ncores = 64\nprice = 2400\n'
    )
    words = ["plan", "--rows", "1e9", "--dim", "32", "--qps", "5000", "--prices", "prices.toml", "--growth", "5%"]
    run = cli(*words, "--html", "plan.html")
    assert run.code == 0, run.err
    assert "chosen: copies of 2 r8" in run.out, "600 a month, where one r64 is 2,400"
    assert "the price, if one input is 25% less / more: " in run.out
    assert re.search(r"growing 5% a month, .* runs out in month \d+", run.out)
    assert "<svg" in (tmp_path / "plan.html").read_text()
    document = cli(*words, "--json").document
    assert document["prices"]["nodes"]["r8"]["price"] == 300
    assert document["growth"]["months"][12]["rows"] == pytest.approx(1e9 * 1.05**12)
    assert document["sensitivity"][0]["what"]
    assert "got both" in cli(*words, "--memory", "1GiB").err
    assert "cannot write" in cli(*words, "--html", "none/plan.html").err
    assert "a share from 0% to 100%" in cli("plan", "--rows", "1e6", "--dim", "16", "--growth", "5 percent").err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--rows", "many"], "--rows: expected a number"),
        (["--rows", "0"], "rows: expected at least 1"),
        (["--rows", "1e6", "--memory", "much"], "--memory: expected a size"),
        (["--rows", "1e6", "--zipf", "9"], "zipf: expected an exponent"),
        (["--rows", "1e6", "--zipf", "1", "--reuse", "x"], "expected --zipf or --reuse"),
        (["--rows", "1e6", "--reuse", "missing.csv"], "cannot read missing.csv"),
    ],
)
def test_a_plan_of_nonsense(cli: Cli, words: list[str], reason: str) -> None:
    run = cli("plan", "--dim", "16", *words)
    assert run.code in (1, 2)
    assert reason in run.err
