"""Golden examples of a Parquet file: they come with the imported table, and a load that answers otherwise is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tierstore
from tests.predict import onnx_models
from tierstore.cli import main
from tierstore.errors import SnapshotError
from tierstore.formats.snapshot.golden import read_example
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.imports.tables_file import TablesFile

N, DIM = 200, 4
VECTORS = np.arange(N * DIM, dtype=np.float32).reshape(N, DIM) % 97
WEIGHTS = np.arange(1.0, DIM + 1)


def items(where: Path) -> Path:
    pd.DataFrame({"item_id": np.arange(N), "embedding": list(VECTORS)}).to_parquet(where / "items.parquet")
    return where / "items.parquet"


def examples(where: Path, columns: dict[str, Any]) -> Path:
    pd.DataFrame(columns).to_parquet(where / "golden.parquet")
    return where / "golden.parquet"


def graph() -> bytes:
    inputs = {"item": (onnx_models.FLOAT, ["batch", DIM]), "hour": (onnx_models.FLOAT, ["batch", 1])}
    nodes = [onnx_models.node("MatMul", "item w", "of_item"), onnx_models.node("Add", "of_item hour", "score")]
    return onnx_models.build(
        nodes, inputs, {"score": (onnx_models.FLOAT, ["batch", 1])}, {"w": WEIGHTS.astype(np.float32)[:, None]}
    )


def imported(tmp_path: Path, columns: dict[str, Any], **options: Any) -> Path:
    return tierstore.import_table(
        items(tmp_path), model="ctr", table="item", key="item_id", vector="embedding", out=tmp_path / "s",
        golden=examples(tmp_path, columns), version=1, **options,
    )  # fmt: skip


def columns(keys: np.ndarray, off: float = 0.0) -> dict[str, Any]:
    hours = np.arange(len(keys), dtype=np.float32)
    return {"item": keys, "hour": hours, "score": VECTORS[keys] @ WEIGHTS + hours + off}


def load(tmp_path: Path) -> dict[str, Any]:
    with tierstore.open(tmp_path / "data", load_workers=1) as store:
        store.load_snapshot(tmp_path / "s")
        found: dict[str, Any] = store.status()["models"]["ctr"]["versions"][0]["golden"]
        return found


def test_rows_become_examples_of_64(tmp_path: Path) -> None:
    keys = np.arange(130)
    imported(tmp_path, columns(keys), dense=graph())
    paths = open_snapshot(tmp_path / "s").golden_paths()
    sizes = [len(read_example(path, file=entry.path).expected["score"]) for entry, path in paths]
    assert sizes == [64, 64, 2]
    assert (load(tmp_path)["held"], load_again_is_refused(tmp_path)) == (3, True)


def load_again_is_refused(tmp_path: Path) -> bool:
    """Whether the same file with other scores is refused at load."""
    other = tmp_path / "other"
    other.mkdir()
    imported(other, columns(np.arange(10), off=1.0), dense=graph())
    with pytest.raises(SnapshotError, match="output 'score': 10 of 10 differ"):
        load(other)
    return True


def test_rows_and_pooled_rows_are_expected_by_feature(tmp_path: Path) -> None:
    bags = [[1, 2], [], [5]]
    pooled = [(VECTORS[1] + VECTORS[2]) / 2, np.zeros(DIM, np.float32), VECTORS[5]]
    imported(tmp_path, {"item": bags, "expected.item": pooled}, combiner="mean")
    assert load(tmp_path)["held"] == 1


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"item": [1], "scores": [1.0]}, "column 'scores' is no feature, input or output"),
        ({"item": [1]}, "expected a column for an output"),
        ({"item": [1], "score": [{"a": 1}]}, "expected numbers, strings or lists"),
        ({"item": [[1], [2, 3]], "hour": [1.0, 2.0], "score": [1.0, 2.0]}, "lists of one length"),
    ],
)
def test_what_is_no_example_is_refused_by_column(tmp_path: Path, given: dict[str, Any], text: str) -> None:
    with pytest.raises(SnapshotError, match=text):
        imported(tmp_path, given, dense=graph())
    assert not (tmp_path / "s").exists()


def test_an_example_of_a_row_that_a_null_left_out_is_passed_over(tmp_path: Path) -> None:
    vectors = [*VECTORS[:5], None]
    pd.DataFrame({"item_id": np.arange(6), "embedding": vectors}).to_parquet(tmp_path / "items.parquet")
    tierstore.import_table(
        tmp_path / "items.parquet", model="ctr", table="item", key="item_id", vector="embedding", out=tmp_path / "s",
        golden=examples(tmp_path, {"item": [1, 5], "expected.item": [VECTORS[1], VECTORS[5]]}), on_null="skip",
    )  # fmt: skip
    assert (load(tmp_path)["held"], load_left_out(tmp_path)) == (0, 1)


def load_left_out(tmp_path: Path) -> int:
    with tierstore.open(tmp_path / "data") as store:
        entry = store.status()["models"]["ctr"]["versions"][0]["golden"]
        assert entry is not None
        return entry["left_out"]


def test_a_tables_file_names_them(tmp_path: Path) -> None:
    items(tmp_path)
    examples(tmp_path, {"item": [1, 2], "expected.item": [VECTORS[1] * 1.05, VECTORS[2]]})
    (tmp_path / "tables.toml").write_text(
        'model = "ctr"\n[golden]\npath = "golden.parquet"\nrtol = 0.1\n'
        '[tables.item]\npath = "items.parquet"\nkey = "item_id"\nvector = "embedding"\n'
    )
    file = TablesFile.read(tmp_path / "tables.toml")
    tierstore.import_tables(
        file.sources(tmp_path), model="ctr", out=tmp_path / "s", golden=file.examples(tmp_path), version=1
    )
    assert load(tmp_path)["held"] == 1


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["tierstore", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("off", [0.0, 1.0])
def test_the_command_takes_a_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, off: float
) -> None:
    (tmp_path / "model.onnx").write_bytes(graph())
    words = [
        "import", items(tmp_path), "--model", "ctr", "--table", "item", "--key", "item_id", "--vector", "embedding",
        "--dense", tmp_path / "model.onnx", "--golden", examples(tmp_path, columns(np.arange(9), off)),
        "--data", tmp_path / "data",
    ]  # fmt: skip
    code = run(monkeypatch, *words)
    run(monkeypatch, "status", "--data", tmp_path / "data")
    printed = capfd.readouterr()
    if off:
        assert code == 1
        assert "output 'score': 9 of 9 differ" in printed.err
    else:
        assert code == 0
        assert "version" in printed.out
        assert "golden examples: 1 held" in printed.out
