"""A watched directory: deltas are taken in order as they appear, and a bad one holds up its model alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.service.conftest import eventually, settings_for
from tests.service.scenes import delta, rows, write_small, write_snapshot
from tierstore.engine.store import Store
from tierstore.service.sources.directory import Watcher


class Watched:
    """A store with the model `ctr` at seq 3, and the directory that is watched for it."""

    def __init__(self, root: Path) -> None:
        self.root, self.directory = root, root / "watched"
        (self.directory / "ctr").mkdir(parents=True)
        self.store = Store(settings_for(root))
        self.store.load_snapshot(write_snapshot(root, 1, delta_seq=3))
        self.watcher = self.watch()

    def watch(self) -> Watcher:
        return Watcher(self.store, self.directory, max_delta=1 << 20, poll_s=0.01)

    def put(self, name: str, content: bytes, model: str = "ctr") -> None:
        directory = self.directory / model
        directory.mkdir(exist_ok=True)
        temporary = directory / f".{name}.tmp"
        temporary.write_bytes(content)
        os.replace(temporary, directory / name)

    def expect(self, key: int, value: float) -> None:
        def there() -> bool:
            return bool(np.array_equal(self.store.model("ctr").lookup("item_id", [key]), rows("item", [value])))

        eventually(there, f"item {key} to be {value}; {self.watcher.status()}")

    def held_up(self, *words: str, model: str = "ctr") -> str:
        def messages() -> str | None:
            error = self.watcher.status()["held_up"].get(model)
            return error if error and all(word in error for word in words) else None

        return str(eventually(messages, f"an error with {words}; {self.watcher.status()}"))


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    scene = Watched(tmp_path)
    yield scene
    scene.watcher.close()
    scene.store.close()


def test_deltas_are_applied_in_order_as_they_appear(watched: Watched) -> None:
    watched.put("5.arrow", delta(5, {1: 50.0}))
    watched.held_up("4 is next")
    (problem,) = watched.watcher.status()["problems"]
    assert str(watched.directory / "ctr") in problem
    assert "4 is next" in problem
    watched.put("4.arrow", delta(4, {1: 40.0, 2: 41.0}))
    watched.put("000006.arrow", delta(6, {3: 60.0}))
    watched.expect(3, 60.0)
    watched.expect(1, 50.0)
    watched.expect(2, 41.0)
    eventually(lambda: watched.watcher.applied == 3, "all are counted")  # they answer a moment before
    assert watched.watcher.status()["held_up"] == {}
    assert watched.watcher.status()["problems"] == []


def test_what_is_old_or_no_delta_is_passed_over(watched: Watched) -> None:
    for name, content in (
        ("1.arrow", b"old"),
        ("3.arrow", b"in the snapshot"),
        ("x.arrow", b""),
        ("4.tmp", b""),
        ("-4.arrow", b""),
    ):
        watched.put(name, content)
    watched.put("4.arrow", delta(4, {1: 40.0}))
    watched.expect(1, 40.0)
    assert watched.watcher.errors == 0


def test_a_bad_file_holds_its_model_up_until_it_is_replaced(watched: Watched) -> None:
    watched.put("4.arrow", b"not arrow")
    watched.put("5.arrow", delta(5, {1: 50.0}))
    assert watched.held_up("write this file again").startswith("4.arrow: ")
    errors = watched.watcher.errors
    watched.store.load_snapshot(write_small(watched.root, "one", "item"))
    watched.put("1.arrow", delta(1, {1: 10.0}, model="one"), model="one")
    eventually(lambda: watched.store.status("one")["models"]["one"]["watermark"] == 1, "the other model to go on")
    assert watched.watcher.errors <= errors + 2, "it is not tried over and over"
    watched.put("4.arrow", delta(4, {2: 40.0}))
    watched.expect(1, 50.0)
    watched.expect(2, 40.0)
    eventually(lambda: watched.watcher.status()["held_up"] == {}, "nothing to be held up")


def test_a_delta_that_lies_beside_the_models_is_a_problem_until_it_is_moved(watched: Watched) -> None:
    for seq in (4, 5):
        (watched.directory / f"{seq}.arrow").write_bytes(delta(seq, {1: 10.0 * seq}))
    expected = "4.arrow and 1 more of no model: expected <model>/<seq>.arrow; move deltas into their model's directory"
    eventually(lambda: watched.watcher.status()["problem"] == expected, "the problem")
    assert watched.watcher.status()["problems"] == [f"watched {watched.directory}: {expected}"]
    assert watched.watcher.applied == 0
    for seq in (4, 5):
        (watched.directory / f"{seq}.arrow").rename(watched.directory / "ctr" / f"{seq}.arrow")
    watched.expect(1, 50.0)
    eventually(lambda: watched.watcher.status()["problem"] is None, "the problem to go")


def test_a_file_for_another_model_or_too_large_is_refused(watched: Watched) -> None:
    watched.put("4.arrow", delta(4, {1: 2.0}, model="other"))
    watched.held_up("other")
    watched.put("4.arrow", bytes((1 << 20) + 1))
    watched.held_up("max_delta")


def test_a_file_that_holds_another_delta_is_refused_before_it_is_applied(watched: Watched) -> None:
    watched.put("4.arrow", delta(5, {1: 50.0}))
    watched.held_up("expected delta 4", "got delta 5")
    watched.put("5.arrow", delta(4, {1: 44.0}))
    watched.put("4.arrow", delta(4, {1: 40.0}))
    watched.held_up("expected delta 5", "got delta 4")
    watched.expect(1, 40.0)
    watched.put("5.arrow", delta(5, {1: 50.0}))
    watched.expect(1, 50.0)
    eventually(lambda: watched.watcher.status()["held_up"] == {}, "nothing to be held up")


def test_a_model_that_comes_later_is_caught_up(watched: Watched) -> None:
    watched.put("1.arrow", delta(1, {1: 10.0}, model="one"), model="one")
    watched.held_up("one", model="one")
    watched.store.load_snapshot(write_small(watched.root, "one", "item"))
    eventually(lambda: watched.store.status("one")["models"]["one"]["watermark"] == 1, "the delta")


def test_a_restart_goes_on_where_it_was(watched: Watched) -> None:
    watched.put("4.arrow", delta(4, {1: 40.0}))
    watched.expect(1, 40.0)
    watched.watcher.close()
    watched.put("5.arrow", delta(5, {1: 50.0}))
    watched.watcher = watched.watch()
    watched.expect(1, 50.0)
    eventually(lambda: watched.watcher.applied == 1, "the count, which follows the delta")
    assert watched.watcher.errors == 0


def test_a_directory_that_goes_away_is_reported(watched: Watched) -> None:
    os.rename(watched.directory, watched.root / "gone")
    problem = eventually(lambda: watched.watcher.status()["problem"], "a problem")
    assert watched.watcher.status()["problems"] == [f"watched {watched.directory}: {problem}"]
    errors = watched.watcher.errors
    os.rename(watched.root / "gone", watched.directory)
    eventually(lambda: watched.watcher.status()["problem"] is None, "the problem to pass")
    watched.put("4.arrow", delta(4, {1: 40.0}))
    watched.expect(1, 40.0)
    assert watched.watcher.errors == errors


def test_files_that_wait_are_applied_together_and_a_bad_one_holds_up_those_after_it(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    together = watched.store.apply_run

    def noted(*arguments: Any) -> int:
        runs.append(together(*arguments))
        return runs[-1]

    monkeypatch.setattr(watched.store, "apply_run", noted)
    (watched.directory / "ctr").rename(watched.root / "aside")
    for seq in range(4, 12):
        path = watched.root / "aside" / f"{seq}.arrow"
        path.write_bytes(delta(seq, {1: float(seq), 100 + seq: float(seq)}) if seq != 9 else b"no delta")
    (watched.root / "aside").rename(watched.directory / "ctr")
    watched.expect(1, 8.0)
    watched.held_up("9.arrow")
    assert runs[0] == 5
    watched.put("9.arrow", delta(9, {1: 9.0}))
    watched.expect(1, 11.0)
    watched.expect(104, 4.0)
    watched.expect(111, 11.0)
    eventually(lambda: watched.watcher.applied == 8, "each is counted")
    assert watched.watcher.status()["held_up"] == {}


def parquet(name: str, items: dict[int, float | None], **columns: Any) -> bytes:
    """A file of rows that sets items, or deletes those without a value."""
    lists = [None if value is None else rows("item", [value])[0].tolist() for value in items.values()]
    table = pa.table({"key": pa.array(list(items)), "vector": pa.array(lists, pa.list_(pa.float32())), **columns})
    sink = pa.BufferOutputStream()
    if name.endswith(".parquet"):
        pq.write_table(table, sink)
    else:
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def test_files_of_rows_are_deltas_among_others(watched: Watched) -> None:
    watched.put("8.parquet", parquet("8.parquet", {1: 80.0, 2: None}, table=["item", "item"]))
    watched.held_up("4 is next")
    watched.put("4.parquet", parquet("4.parquet", {1: 40.0, 3: 43.0}, table=["item", "item"]))
    watched.put("5.arrow", delta(5, {1: 50.0}))
    watched.put("6.arrow", delta(6, {2: 60.0}))
    watched.put("7.arrow", parquet("7.arrow", {2: 70.0}, table=["item"]))
    watched.expect(1, 80.0)
    watched.expect(3, 43.0)
    eventually(lambda: watched.watcher.applied == 5, "all are counted")
    assert not watched.store.model("ctr").lookup("item_id", [2], return_found=True)[1][0]
    watched.watcher.close()
    watched.watcher = watched.watch()
    watched.put("9.parquet", parquet("9.parquet", {1: 90.0}, table=["item"]))
    watched.expect(1, 90.0)
    assert watched.watcher.applied == 1, "the others are not applied again"


def test_a_file_of_rows_without_its_table_or_too_large_holds_the_model_up(watched: Watched) -> None:
    watched.put("4.parquet", parquet("4.parquet", {1: 40.0}))
    watched.held_up("4.parquet", "expected the table of these rows", "column 'table'", "write this file again")
    large = dict.fromkeys(range(70000), 0.0)
    watched.put("4.parquet", parquet("4.parquet", large, table=["item"] * len(large)))
    watched.held_up("4.parquet", str(1 << 20), "split")
    watched.put("4.parquet", parquet("4.parquet", {1: 40.0}, table=["item"]))
    watched.expect(1, 40.0)
    watched.store.load_snapshot(write_small(watched.root, "one", "item"))
    watched.put("1.parquet", parquet("1.parquet", {1: 10.0}), model="one")  # its only table
    eventually(lambda: watched.store.status("one")["models"]["one"]["watermark"] == 1, "the only table to be taken")
