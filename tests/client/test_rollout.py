"""`rollout` on real nodes: done, started again, and taken back; and nodes compared."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.client.nodes import DIM, ITEMS, Node, nodes, row, write_change, write_version
from tests.engine import scenes
from tests.engine.test_store import folded
from tierstore.access.roles import Role
from tierstore.access.tokens import TokenFile
from tierstore.client import Client
from tierstore.client.replicas import compare_replicas, compare_rows
from tierstore.client.rollout import _Node, _Rollout, rollout
from tierstore.engine.versions.expiry import expire
from tierstore.errors import Conflict, InvalidInput, RolloutFailed, TierstoreError, Unreachable, explained
from tierstore.verdicts import Requests

QUICK: dict[str, Any] = {"check_s": 0.0, "max_wait_s": 60.0}


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Node]]:
    """Two nodes that serve version 1."""
    with nodes(tmp_path, 2) as made:
        snapshot = write_version(tmp_path, 1)
        for node in made:
            node.store.load_snapshot(snapshot)
        yield made


def urls(of: list[Node]) -> list[str]:
    return [node.url for node in of]


def active(of: list[Node]) -> list[int | None]:
    return [node.store.model("ctr").active_version if node.store.models() else None for node in of]


def canaries(of: list[Node]) -> list[Any]:
    return [node.store.status("ctr")["models"]["ctr"]["canary"] for node in of]


@contextmanager
def clients(of: list[Node]) -> Iterator[dict[str, Client]]:
    with ExitStack() as stack:
        yield {node.url: stack.enter_context(Client(node.url)) for node in of}


def test_a_first_snapshot_a_second_and_the_same_again(tmp_path: Path) -> None:
    with nodes(tmp_path, 2) as made:
        first = rollout(write_version(tmp_path, 1), urls(made), **QUICK)
        assert active(made) == [1, 1]
        assert first.before == dict.fromkeys(urls(made))
        snapshot = write_version(tmp_path, 2)
        lines: list[str] = []
        second = tierstore.rollout(snapshot, ",".join(urls(made)), policy="all-at-once", say=lines.append, **QUICK)
        assert active(made) == [2, 2]
        assert canaries(made) == [None, None]
        assert (second.loaded, sorted(second.switched), second.seq) == (urls(made), sorted(urls(made)), 5)
        assert any("is ready" in line for line in lines)
        again = rollout(snapshot, urls(made), **QUICK)
        assert (again.loaded, again.switched, again.seq) == ([], [], 5)
        assert [node.store.model("ctr").versions for node in made] == [[1, 2]] * 2


def test_nodes_that_cannot_read_the_snapshot_are_sent_it(tmp_path: Path) -> None:
    (tmp_path / "roots").mkdir()
    with nodes(tmp_path, 2, source_root=[tmp_path / "roots"]) as made:
        assert rollout(write_version(tmp_path, 1), urls(made), **QUICK).loaded == urls(made)
        assert active(made) == [1, 1]


def test_a_token_that_cannot_see_what_fails_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "tokens.json")
    (_, narrow), (_, wide) = tokens.create(Role.ADMIN, ["ctr"]), tokens.create(Role.ADMIN, None)
    snapshot, said = write_version(tmp_path, 1), list[str]()
    with nodes(tmp_path, 2, tokens=tmp_path / "tokens.json") as made:
        with pytest.raises(TierstoreError) as refused:
            rollout(snapshot, urls(made), token=narrow, say=said.append, **QUICK)
        assert "a token for all models" in explained(refused.value)
        assert [node.store.models() for node in made] == [[], []]
        assert said == []
        assert rollout(snapshot, urls(made), token=wide, **QUICK).loaded == urls(made)


def test_a_run_that_was_broken_off_is_continued(two: list[Node], tmp_path: Path) -> None:
    snapshot = write_version(tmp_path, 2)
    two[0].store.load_snapshot(snapshot)  # loaded and switched
    two[1].store.load_snapshot(snapshot, activate=False)
    two[1].store.canary("ctr", 2, 0.0)  # loaded and ready
    report = rollout(snapshot, urls(two), **QUICK)
    assert (report.loaded, report.switched) == ([], [two[1].url])
    assert active(two) == [2, 2]


def test_requests_see_no_gap_and_deltas_go_on(two: list[Node], tmp_path: Path) -> None:
    done = threading.Event()
    failures: list[str] = []

    def ask() -> None:
        with Client(urls(two), timeout_s=60.0) as client:
            while not done.is_set():
                try:
                    rows = client.lookup("ctr", "item_id", np.arange(ITEMS))
                except TierstoreError as error:
                    failures.append(str(error))
                    return
                if rows[7, 0] not in (row(1, 7)[0], row(2, 7)[0]):
                    failures.append(f"{rows[7]}")

    def push() -> None:
        seq = 6
        while not done.is_set():
            change = write_change(tmp_path, seq, [ITEMS - 1], float(seq))
            for node in two:
                node.store.apply_delta(change)
            seq += 1
            done.wait(0.05)

    threads = [threading.Thread(target=ask), threading.Thread(target=push)]
    for thread in threads:
        thread.start()
    try:
        report = rollout(write_version(tmp_path, 2), urls(two), **QUICK)
    finally:
        done.set()
        for thread in threads:
            thread.join(60)
    assert failures == []
    assert active(two) == [2, 2]
    assert report.seq is not None
    assert report.seq >= 5


@pytest.mark.parametrize("policy", ["one-by-one", "all-at-once"])
def test_a_node_whose_rows_differ_is_noticed_before_anything_is_switched(
    two: list[Node], tmp_path: Path, policy: Any
) -> None:
    snapshot = write_version(tmp_path, 2)
    two[0].store.load_snapshot(snapshot, activate=False)
    two[1].store.load_snapshot(write_version(tmp_path, 2, shift=1), activate=False)  # another snapshot of that number
    with pytest.raises(RolloutFailed, match=r"rows of table 'item' differ at seq 5: .* every node serves") as raised:
        rollout(snapshot, urls(two), policy=policy, **QUICK)
    assert raised.value.restored
    assert two[0].url in str(raised.value)
    assert active(two) == [1, 1]
    assert canaries(two) == [None, None]


def test_a_node_that_refuses_the_snapshot_stops_it(two: list[Node], tmp_path: Path) -> None:
    snapshot = write_version(tmp_path, 2)
    two[1].store.load_snapshot(write_version(tmp_path, 7))  # with the log restarted? the seq is the same
    next(snapshot.glob("item/*")).unlink()
    with pytest.raises(RolloutFailed, match=r"item.*every node serves what it did before"):
        rollout(snapshot, urls(two), **QUICK)
    assert active(two) == [1, 7]


@pytest.mark.parametrize("policy", ["one-by-one", "all-at-once"])
def test_what_fails_after_the_switch_is_taken_back_everywhere(
    two: list[Node], tmp_path: Path, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise Conflict("the disk of this node is on fire")

    monkeypatch.setattr(two[1].store, "activate", failing)
    with pytest.raises(RolloutFailed, match=f"{two[1].url}: .*on fire.*every node serves") as raised:
        rollout(write_version(tmp_path, 2), urls(two), policy=policy, **QUICK)
    assert raised.value.restored
    assert active(two) == [1, 1]
    assert canaries(two) == [None, None]
    with clients(two) as of:
        assert [client.lookup("ctr", "item_id", [3]).tolist() for client in of.values()] == [[row(1, 3)]] * 2
    monkeypatch.undo()
    assert rollout(tmp_path / "ctr-2-0", urls(two), **QUICK).loaded == []
    assert active(two) == [2, 2]


def test_errors_after_the_switch_take_it_back(two: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {1: Requests(100_000, 1_000), 2: Requests(10, 1)}
    after = iter(
        [Requests(1010, 16), Requests(1010, 56)]
    )  # as many as of version 1 on the first node, more on the second
    looks = iter(range(4))
    monkeypatch.setattr(_Rollout, "_requests", lambda *_: before if next(looks) % 2 == 0 else before | {2: next(after)})
    with pytest.raises(RolloutFailed, match=f"{two[1].url}: 55 of 1000 requests of version 2 failed") as raised:
        rollout(write_version(tmp_path, 2), urls(two), **QUICK)
    assert raised.value.restored
    assert active(two) == [1, 1]


def test_requests_of_a_version_are_counted_from_the_metrics(two: list[Node]) -> None:
    with Client(two[0].url) as client, ThreadPoolExecutor(1) as threads:
        node = _Node(two[0].url, client, client)
        counting = _Rollout([node], threads, "", "ctr", 1, 1.0, 1.0, print)
        assert counting._requests(node)[1] == Requests()
        for key in range(5):
            client.lookup("ctr", "item_id", [key])
        until = time.monotonic() + 60
        while (counted := counting._requests(node)[1]) != Requests(5):
            assert time.monotonic() < until, counted
            time.sleep(0.05)


def test_requests_of_heads_count_for_the_version_of_their_model(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    with nodes(tmp_path, 1) as (one,), Client(one.url) as client, ThreadPoolExecutor(1) as threads:
        one.store.load_snapshot(scenes.write_snapshot(tmp_path, heads={"cvr": scenes.some_dense()}))
        node = _Node(one.url, client, client)
        counting = _Rollout([node], threads, "", "ctr", 1, 1.0, 1.0, print)
        for key in range(5):
            client.predict("ctr.cvr", {"user_id": [key]})
        scenes.eventually(lambda: counting._requests(node)[1] == Requests(5), "all of them are counted")


def test_a_canary_on_all_nodes_is_tried_before_any_node_switches(two: list[Node], tmp_path: Path) -> None:
    lines: list[str] = []
    done = threading.Event()

    def ask() -> None:
        with Client(urls(two)) as client:
            while not done.is_set():
                client.lookup("ctr", "item_id", [1])

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        rollout(write_version(tmp_path, 2), urls(two), canary=0.5, canary_s=1.0, say=lines.append, **QUICK)
    finally:
        done.set()
        asking.join(60)
    assert active(two) == [2, 2]
    assert canaries(two) == [None, None]
    words = next(line for line in lines if line.startswith("the canary: 0 of "))
    assert int(words.split()[4]) > 0, "it was asked"
    begun, tried = (next(i for i, line in enumerate(lines) if text in line) for text in ("gets 0.5 of", "the canary: "))
    assert begun < tried < min(i for i, line in enumerate(lines) if "is active" in line)


def test_a_canary_that_fails_on_one_node_is_withdrawn_on_all(
    two: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = {two[0].url: 0, two[1].url: 5}
    looks: dict[str, int] = dict.fromkeys(failed, 0)

    def requests(_: _Rollout, node: _Node) -> dict[int, Requests]:
        looks[node.url] += 1
        new = Requests(50, failed[node.url]) if looks[node.url] > 1 else Requests()
        return {1: Requests(1000 * looks[node.url]), 2: new}

    monkeypatch.setattr(_Rollout, "_requests", requests)
    with pytest.raises(
        RolloutFailed, match="the canary: 5 of 100 requests failed, of the active version 0 of 2000"
    ) as raised:
        rollout(write_version(tmp_path, 2), urls(two), canary=0.05, canary_s=60.0, **QUICK)
    assert raised.value.restored
    assert active(two) == [1, 1]
    assert canaries(two) == [None, None]


def test_a_canary_that_somebody_withdraws_ends_the_rollout(
    two: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = _Rollout._requests

    def withdrawn(self: _Rollout, node: _Node) -> Any:
        if node.url == two[1].url and canaries(two)[1] is not None:
            two[1].store.withdraw("ctr")
        return requests(self, node)

    monkeypatch.setattr(_Rollout, "_requests", withdrawn)
    with pytest.raises(RolloutFailed, match=f"{two[1].url}: version 2 was withdrawn or promoted by somebody else"):
        rollout(write_version(tmp_path, 2), urls(two), canary=0.05, canary_s=60.0, **QUICK)
    assert active(two) == [1, 1]


def test_a_share_that_is_none_is_refused_before_anything_is_done() -> None:
    for share in (0.0, 1.5):
        with pytest.raises(InvalidInput, match="canary: expected a share"):
            rollout("x", ["http://127.0.0.1:1"], model="m", version=1, canary=share)


def test_an_interrupted_rollout_goes_back(two: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_Rollout, "_compare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rollout(write_version(tmp_path, 2), urls(two), **QUICK)
    assert active(two) == [1, 1]
    assert canaries(two) == [None, None]


def test_a_first_snapshot_that_fails_leaves_nothing_active(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with nodes(tmp_path, 2) as made:

        def failing(*_: Any, **__: Any) -> None:
            raise Conflict("not here")

        monkeypatch.setattr(made[1].store, "activate", failing)
        with pytest.raises(RolloutFailed, match="not here") as raised:
            rollout(write_version(tmp_path, 1), urls(made), **QUICK)
        assert raised.value.restored
        assert active(made) == [None, None]


def test_a_node_that_cannot_go_back_is_named(two: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    activate = two[0].store.activate

    def only_forward(model: str, version: int, **options: Any) -> None:
        if version == 1:
            raise Conflict("version 1 is gone")
        activate(model, version, **options)

    def failing(*_: Any, **__: Any) -> None:
        raise Conflict("no")

    def gone(*_: Any, **__: Any) -> None:
        raise Conflict("version 1 is gone")

    monkeypatch.setattr(two[0].store, "activate", only_forward)
    monkeypatch.setattr(two[0].store, "rollback", gone)
    monkeypatch.setattr(two[1].store, "activate", failing)
    with pytest.raises(RolloutFailed, match=f"NOT every node.*{two[0].url}: version 1 is gone") as raised:
        rollout(write_version(tmp_path, 2), urls(two), **QUICK)
    assert not raised.value.restored
    assert active(two) == [2, 1]


def test_what_changed_meanwhile_is_no_business_of_a_rollout(two: list[Node], tmp_path: Path) -> None:
    three, four = write_version(tmp_path, 3), write_version(tmp_path, 4)
    two[1].store.load_snapshot(three, activate=False)
    two[1].store.canary("ctr", 3, 0.0)
    with pytest.raises(TierstoreError, match=f"{two[1].url}: version 3 is the canary; promote or withdraw it first"):
        rollout(four, urls(two), **QUICK)
    assert active(two) == [1, 1]
    assert two[0].store.model("ctr").versions == [1]


def test_wrong_use_and_a_node_that_is_away_change_nothing(two: list[Node], tmp_path: Path) -> None:
    snapshot = write_version(tmp_path, 2)
    with pytest.raises(InvalidInput, match="policy: expected one of one-by-one, all-at-once, got 'now'"):
        rollout(snapshot, urls(two), policy="now", **QUICK)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="name it"):
        rollout("s3://bucket/x", urls(two), **QUICK)
    with pytest.raises(TierstoreError, match=r"http://127.0.0.1:1: no service answers"):
        rollout(snapshot, [*urls(two), "http://127.0.0.1:1"], retries=0, **QUICK)
    assert [node.store.model("ctr").versions for node in two] == [[1], [1]]


def test_activate_may_name_the_version_that_it_replaces(two: list[Node], tmp_path: Path) -> None:
    two[0].store.load_snapshot(write_version(tmp_path, 2), activate=False)
    with Client(two[0].url) as client:
        with pytest.raises(Conflict, match="expected version 5 to be active, got 1"):
            client.activate("ctr", 2, expected_active=5)
        client.activate("ctr", 2, expected_active=1)
        client.activate("ctr", 2, expected_active=1)  # sent again
        assert active(two) == [2, 1]


# --- compared


def test_nodes_are_equal_at_a_seq_and_differ_where_a_row_does(two: list[Node], tmp_path: Path) -> None:
    same = write_change(tmp_path, 6, [1, 2], 6.0)
    for node in two:
        node.store.apply_delta(same)
    with clients(two) as of:
        errors, (model,) = compare_replicas(of)
        assert (errors, model.problems) == ({}, [])
        assert model.rows is not None
        assert model.rows.seq == 6
        assert model.rows.keys > 128
        for node, value in zip(two, (7.0, 8.0), strict=True):
            node.store.apply_delta(write_change(tmp_path, 7, np.arange(ITEMS), value))
        _, (model,) = compare_replicas(of)
        assert [problem.split(":")[0] for problem in model.problems] == ["rows of table 'item' differ at seq 7"]


def test_a_row_that_only_one_node_has_is_a_difference(two: list[Node], tmp_path: Path) -> None:
    with tierstore.DeltaWriter(tmp_path / "6.arrow", model="ctr", seq=6, event_time="2026-01-01T00:00:00Z") as delta:
        delta.delete("item", np.arange(0, ITEMS, 2))
    two[0].store.apply_delta(tmp_path / "6.arrow")
    two[1].store.apply_delta(write_change(tmp_path, 6, [1], row(1, 1)[0]))
    with clients(two) as of:
        rows = compare_rows(of, "ctr", 1)
    assert "differ at seq 6" in "".join(rows.problems)


def test_nodes_that_do_not_meet_are_told_apart_by_their_watermarks(two: list[Node], tmp_path: Path) -> None:
    two[0].store.apply_delta(write_change(tmp_path, 6, [1], 6.0))
    with clients(two) as of:
        _, (model,) = compare_replicas(of, wait_s=0.2)
        assert model.problems == [
            f"watermarks differ, and did not meet within 0.2 s: 6 on {two[0].url}; 5 on {two[1].url}"
        ]
        late = threading.Timer(0.3, two[1].store.apply_delta, [write_change(tmp_path, 6, [1], 6.0)])
        late.start()
        _, (model,) = compare_replicas(of, wait_s=60.0)
        late.join()
        assert model.problems == []


def test_versions_and_models_that_differ_are_named(two: list[Node], tmp_path: Path) -> None:
    two[1].store.load_snapshot(write_version(tmp_path, 2))
    two[0].store.load_snapshot(write_version(tmp_path, 1, name="one"))
    with clients(two) as of, Client("http://127.0.0.1:1", retries=0) as away:
        errors, (ctr, one) = compare_replicas({**of, "http://127.0.0.1:1": away})
    assert list(errors) == ["http://127.0.0.1:1"]
    assert ctr.problems == [f"active versions differ: 1 on {two[0].url}; 2 on {two[1].url}"]
    assert one.problems == [f"{two[1].url} has no model 'one'"]
    with pytest.raises(Unreachable), Client("http://127.0.0.1:1", retries=0) as away:
        compare_rows({"http://127.0.0.1:1": away}, "ctr", 1)


def test_rows_that_one_node_has_removed_already_are_no_difference(tmp_path: Path) -> None:
    with nodes(tmp_path, 2, ttl_check_s=0.0) as made, clients(made) as of:
        with tierstore.SnapshotWriter(tmp_path / "timed", model="ctr", version=1, delta_seq=0) as snapshot:
            keys, now_s = np.arange(ITEMS), int(time.time())
            table = snapshot.table("user", dim=DIM, ttl_s="30d", time_column="seen")
            table.write(keys, np.ones((ITEMS, DIM)), np.full(ITEMS, now_s))
            snapshot.feature("user", table="user")
        with tierstore.DeltaWriter(tmp_path / "old.arrow", model="ctr", seq=1, event_time=now_s - 40 * 86400) as delta:
            delta.upsert("user", keys[::2], np.zeros((ITEMS // 2, DIM)))
        for node in made:
            node.store.load_snapshot(tmp_path / "timed")
            node.store.apply_delta(tmp_path / "old.arrow")
            folded(node.store)
        (view,) = made[0].store.model("ctr").served.views
        assert len(expire(view.open_version, "user", keys, now_s - 30 * 86400)) == ITEMS // 2
        found = [client.sample("ctr", rows=ITEMS)["tables"]["user"]["found"] for client in of.values()]
        assert found[0] < found[1]
        _, (same,) = compare_replicas(of, rows=ITEMS)
        assert same.problems == []
        assert same.rows is not None
        assert (same.rows.keys > ITEMS // 2, same.rows.seq) == (True, 1)
        expire(view.open_version, "user", keys[1:2], now_s + 1)  # too early
        _, (other,) = compare_replicas(of, rows=ITEMS)
        assert [problem.split(":")[0] for problem in other.problems] == ["rows of table 'user' differ at seq 1"]


def test_a_sample_of_chosen_keys(two: list[Node]) -> None:
    with Client(two[0].url) as client:
        chosen = client.sample("ctr", rows=64)
        assert (chosen["version"], chosen["seq"]) == (1, 5)
        item = chosen["tables"]["item"]
        assert len(item["keys"]) == item["found"]
        assert 16 < len(item["keys"]) <= 64
        assert max(item["keys"]) > ITEMS // 2, "they are spread over the table"
        again = client.sample("ctr", keys={"item": item["keys"]}, version="stable")
        assert again["tables"]["item"] == item
        other = client.sample("ctr", keys={"item": [10**9]})["tables"]["item"]
        assert (other["found"], other["keys"]) == (0, [10**9])
        with pytest.raises(InvalidInput, match="no table 'x'; version 1 has item, word"):
            client.sample("ctr", keys={"x": [1]})
        with pytest.raises(InvalidInput, match="fit int64"):
            client.sample("ctr", keys={"item": [2**63]})


def test_golden_examples_that_differ_end_it_at_the_first_node(two: list[Node], tmp_path: Path) -> None:
    where = tmp_path / "wrong"
    with tierstore.SnapshotWriter(where, model="ctr", version=2, delta_seq=5) as snapshot:
        snapshot.table("item", dim=DIM).write([1], np.ones((1, DIM), np.float32))
        snapshot.feature("item_id", table="item")
        snapshot.golden({"item_id": [1]}, {"item_id": np.zeros((1, DIM), np.float32)})
    with pytest.raises(RolloutFailed, match="golden example 0"):
        rollout(where, urls(two), **QUICK)
    assert active(two) == [1, 1]
    assert [[entry["version"] for entry in node.store.status()["models"]["ctr"]["versions"]] for node in two] == [
        [1]
    ] * 2
