"""Tensors that torch.distributed.checkpoint has cut over safetensors: whole again, or refused where a piece is not there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.imports.make_corpus import safetensors
from tests.imports.test_tables import rows_of
from tierstore.errors import SnapshotError
from tierstore.imports.tables import import_table

ROWS = np.arange(40_000 * 3, dtype=np.float32).reshape(-1, 3)  # more than a batch
SMALL = ROWS[:10]
WHOLE = dict(enumerate(SMALL.tolist()))


def shard(folder: Path, number: int, pieces: dict[str, tuple[np.ndarray, Sequence[int]]]) -> Path:
    """A file as `HuggingFaceStorageWriter(save_distributed=True)` leaves it on one rank."""
    path = folder / f"shard-{number:05d}-model-00001-of-00001.safetensors"
    info = {name: {"saved_offsets": list(offsets)} for name, (_, offsets) in pieces.items()}
    metadata = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}
    safetensors(path, {name: np.ascontiguousarray(array) for name, (array, _) in pieces.items()}, metadata)
    return path


def cut(folder: Path, array: np.ndarray, edges: Sequence[Sequence[int]], name: str = "item.weight") -> Path:
    """`array` as files in `folder`, one for each rectangle [first row, end, first column, end]."""
    for number, (top, bottom, left, right) in enumerate(edges, 1):
        shard(folder, number, {name: (array[top:bottom, left:right], (top, left))})
    return folder


def imported(source: object, where: Path, **options: object) -> dict[int, list[float]]:
    import_table(source, model="ctr", table="item", out=where, **options)
    return rows_of(where)


@pytest.mark.parametrize(
    "edges",
    [
        [(0, 5, 0, 3), (5, 10, 0, 3)],
        [(5, 10, 0, 3), (0, 5, 0, 3)],
        [(0, 10, 0, 2), (0, 10, 2, 3)],
        [(0, 4, 0, 3), (4, 10, 0, 1), (4, 10, 1, 3)],
        [(0, 10, 0, 3), (10, 10, 0, 3)],
        [(0, 10, 0, 3)],
    ],
    ids=["rows", "rows in another order", "columns", "both", "a rank without rows", "one rank"],
)
def test_pieces_are_one_tensor_again(tmp_path: Path, edges: list[tuple[int, ...]]) -> None:
    assert imported(cut(tmp_path / "model", SMALL, edges), tmp_path / "s") == WHOLE


def test_pieces_longer_than_a_batch(tmp_path: Path) -> None:
    folder = cut(tmp_path / "model", ROWS, [(0, 39_000, 0, 3), (39_000, 40_000, 0, 2), (39_000, 40_000, 2, 3)])
    assert imported(folder, tmp_path / "s") == dict(enumerate(ROWS.tolist()))


def test_keys_may_be_cut_as_well(tmp_path: Path) -> None:
    keys = np.arange(10) * 7
    for number, rows in enumerate((slice(0, 4), slice(4, 10)), 1):
        begin = rows.start
        pieces = {"ids": (keys[rows], (begin,)), "rows": (SMALL[rows], (begin, 0))}
        shard(tmp_path / "model", number, pieces)
    rows = imported(tmp_path / "model", tmp_path / "s", key="ids", vector="rows")
    assert rows == dict(zip(keys.tolist(), SMALL.tolist(), strict=True))


def test_one_shard_of_several_is_refused_with_what_to_name(tmp_path: Path) -> None:
    folder = cut(tmp_path / "model", SMALL, [(0, 5, 0, 3), (5, 10, 0, 3)])
    for file in sorted(folder.iterdir()):
        with pytest.raises(
            SnapshotError, match=rf"{file.name}: holds a part of each tensor, .* name their directory, "
        ):
            imported(file, tmp_path / "s")
    assert imported(sorted(folder.iterdir()), tmp_path / "both") == WHOLE


@pytest.mark.parametrize(
    ("edges", "reason"),
    [
        ([(5, 10, 0, 3)], r"'item.weight': the piece at \[0, 0\] is missing"),
        ([(0, 2, 0, 3), (5, 10, 0, 3)], r"the piece at \[2, 0\] is missing"),
        ([(0, 10, 0, 1), (0, 10, 2, 3)], r"the piece at \[0, 1\] is missing"),
        ([(0, 6, 0, 3), (4, 10, 0, 3)], r"the piece at \[4, 0\] is there more than once"),
    ],
)
def test_pieces_with_a_hole_or_over_each_other_are_refused(
    tmp_path: Path, edges: list[tuple[int, ...]], reason: str
) -> None:
    with pytest.raises(SnapshotError, match=reason):
        imported(cut(tmp_path / "model", SMALL, edges), tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_whole_beside_its_pieces_is_named(tmp_path: Path) -> None:
    """As `enable_consolidation=True` leaves both."""
    cut(tmp_path / "model/sharded", SMALL, [(0, 5, 0, 3), (5, 10, 0, 3)])
    safetensors(tmp_path / "model/model-00001-of-00001.safetensors", {"item.weight": SMALL})
    with pytest.raises(SnapshotError, match=r"is in .*model-00001-of-00001.safetensors, .*sharded too"):
        imported(tmp_path / "model", tmp_path / "refused")
    assert imported(tmp_path / "model/sharded", tmp_path / "pieces") == WHOLE
    assert imported(tmp_path / "model/model-00001-of-00001.safetensors", tmp_path / "whole") == WHOLE


@pytest.mark.parametrize(
    "info", ["{", "[]", '{"item.weight": 3}', '{"item.weight": {"saved_offsets": [0]}}', '{"item.weight": {"saved_offsets": [-1, 0]}}']
)  # fmt: skip
def test_offsets_that_are_none_are_refused(tmp_path: Path, info: str) -> None:
    safetensors(tmp_path / "a.safetensors", {"item.weight": SMALL}, {"DCP_SHARDING_INFO": info})
    with pytest.raises(
        SnapshotError, match=r"a.safetensors: its metadata DCP_SHARDING_INFO is not as PyTorch writes it"
    ):
        imported(tmp_path / "a.safetensors", tmp_path / "s")


def test_what_pytorch_itself_has_written(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make trainers")
    pytest.importorskip("safetensors", reason="safetensors is not installed, with which PyTorch writes such files")
    from torch.distributed import checkpoint

    writer = checkpoint.HuggingFaceStorageWriter(str(tmp_path / "model"), save_distributed=True)
    checkpoint.save({"item.weight": torch.tensor(SMALL)}, storage_writer=writer, no_dist=True)
    assert imported(tmp_path / "model", tmp_path / "s") == WHOLE
