"""`tierstore delta` of files of rows: on a data directory and through a service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.conftest import Cli, row, write_delta, write_snapshot
from tierstore.cli import delta as command


def write_rows(root: Path, name: str, stamp: int, *keys: int | None, gone: tuple[int, ...] = ()) -> Path:
    path = root / name
    vectors = [row(stamp, key) for key in keys if key is not None] + [None] * len(gone)
    lists = pa.array(vectors, pa.list_(pa.float32()))
    pq.write_table(pa.table({"key": pa.array([*keys, *gone]), "vector": lists}), path)
    return path


def looked_up(cli: Cli, place: list[str], key: int) -> Any:
    (one,) = cli("lookup", "ctr", "item_id", key, *place, "--json").document["rows"]
    return one["row"] if one["found"] else None


def test_rows_take_the_next_seq_or_the_one_that_is_named(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    assert cli("load", write_snapshot(tmp_path, 1), *place).code == 0
    of = ["--model", "ctr", "--table", "item", *place]
    files = [write_rows(tmp_path, "a.parquet", 11, 1, 2), write_rows(tmp_path, "b.parquet", 12, 2, gone=(3,))]
    assert cli("delta", *files, *of).out.splitlines() == ["ctr delta 11 is applied", "ctr delta 12 is applied"]
    assert looked_up(cli, place, 1) == row(11, 1)
    assert looked_up(cli, place, 2) == row(12, 2)
    assert looked_up(cli, place, 3) is None
    mixed = [write_delta(tmp_path, 13, 4), *files]
    assert cli("delta", mixed[0], "--model", "ctr", *place).out == "ctr delta 13 is applied\n"
    assert cli("delta", *files, *of, "--seq", 14).out.splitlines() == [
        "ctr delta 14 is applied",
        "ctr delta 15 is applied",
    ]
    again = cli("delta", *files, *of, "--seq", 14, "--json").document
    assert [(one["seq"], one["applied"]) for one in again] == [(14, False), (15, False)]
    other = cli("delta", files[1], *of, "--seq", 14)
    assert (other.code, "held with other content" in other.err) == (1, True)
    gap = cli("delta", files[1], *of, "--seq", 17)
    assert (gap.code, "16 is next" in gap.err) == (1, True)


def test_two_writers_of_one_seq_do_not_lose_rows(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: list[str]
) -> None:
    """The second finds that its seq is taken, says so, and changes nothing; run again it takes the next."""
    assert cli("load", write_snapshot(tmp_path, 1), *place).code == 0
    mine, theirs = write_rows(tmp_path, "mine.parquet", 21, 1), write_delta(tmp_path, 11, 1)
    real = command.open_target
    raced = []

    class Raced:
        """A target on which another writer is first, between the look at the status and the delta."""

        def __init__(self, target: Any) -> None:
            self.status = target.status
            self._target = target

        def apply_delta(self, source: Any, **options: Any) -> Any:
            if not raced:
                raced.append(self._target.apply_delta(theirs))
            return self._target.apply_delta(source, **options)

    class Opened:
        def __init__(self, *where: Any) -> None:
            self._opened = real(*where)

        def __enter__(self) -> Raced:
            return Raced(self._opened.__enter__())

        def __exit__(self, *error: Any) -> Any:
            return self._opened.__exit__(*error)

    monkeypatch.setattr(command, "open_target", Opened)
    of = ["--model", "ctr", "--table", "item", *place]
    second = cli("delta", mine, *of)
    assert second.code == 1
    assert "was to be delta 11 of ctr, and was not applied: another writer" in second.err
    assert "takes the next seq" in second.err
    assert looked_up(cli, place, 1) == row(11, 1), "what the first wrote"
    assert cli("delta", mine, *of).out == "ctr delta 12 is applied\n"
    assert looked_up(cli, place, 1) == row(21, 1)


def test_after_a_rollback_rows_take_a_seq_that_was_not_used(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    assert cli("load", write_snapshot(tmp_path, 1), *place).code == 0
    of = ["--model", "ctr", "--table", "item", *place]
    path = write_rows(tmp_path, "a.parquet", 11, 1)
    assert cli("delta", path, *of).code == 0
    assert cli("rollback", "ctr", "--to-seq", 10, *place).code == 0
    assert looked_up(cli, place, 1) == row(1, 1)
    assert cli("delta", path, *of).out == "ctr delta 12 is applied\n"
    assert looked_up(cli, place, 1) == row(11, 1)


def test_what_is_missing_or_of_another_kind_is_said(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    assert cli("load", write_snapshot(tmp_path, 1), *place).code == 0
    path, own = write_rows(tmp_path, "a.parquet", 11, 1), write_delta(tmp_path, 11, 1)
    assert "--model" in cli("delta", path, *place).err
    assert "item, word" in cli("delta", path, "--model", "ctr", *place).err
    assert "expected a table among item, word, got 'items'" in cli("delta", path, "--model", "ctr", "--table", "items", *place).err  # fmt: skip
    assert "says its seq" in cli("delta", own, "--model", "ctr", "--seq", 11, *place).err
    assert "'other'" in cli("delta", path, "--model", "other", "--table", "item", *place).err
    assert looked_up(cli, place, 1) == row(1, 1)


def test_deltas_of_torcheasyrec(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    """Its three columns, of which zeros are a tombstone: both tables in one delta."""
    assert cli("load", write_snapshot(tmp_path, 1), *place).code == 0
    columns = {
        "embedding_name": pa.array(["item", "item"]),
        "key_id": pa.array([1, 2]),
        "embedding": pa.array([row(11, 1), [0.0] * 8], pa.list_(pa.float32())),
    }
    pq.write_table(pa.table(columns), tmp_path / "step-100.parquet")
    names = ["--key", "key_id", "--vector", "embedding", "--table-column", "embedding_name", "--zeros-delete"]
    assert (
        cli("delta", tmp_path / "step-100.parquet", "--model", "ctr", *names, *place).out == "ctr delta 11 is applied\n"
    )
    assert looked_up(cli, place, 1) == row(11, 1)
    assert looked_up(cli, place, 2) is None
