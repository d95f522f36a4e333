"""HPS's `ps.json`: its models become snapshots, wherever the paths in it have gone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.imports.test_tables import rows_of
from tierstore.errors import SnapshotError
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.imports.hps import read_ps_json
from tierstore.imports.tables import import_tables

TABLES = {"sparse_embedding1": (3, 1.0), "sparse_embedding2": (2, 0.0)}  # name → (numbers a row, default)


def hps(root: Path, inside: str = "/model/wdl/1", **changes: Any) -> Path:
    """A model of two tables as HugeCTR saves it, and the `ps.json` of a container that has `root` as `/`."""
    files = []
    for i, (dim, _) in enumerate(TABLES.values()):
        folder = root / inside.lstrip("/") / f"wdl{i}_sparse_2000.model"
        folder.mkdir(parents=True)
        np.arange(5, dtype="<i8").tofile(folder / "key")
        (np.arange(5 * dim, dtype="<f4") + i).tofile(folder / "emb_vector")
        files.append(f"{inside}/{folder.name}")
    model = {
        "model": "wdl",
        "sparse_files": files,
        "dense_file": f"{inside}/wdl_dense_2000.model",
        "num_of_worker_buffer_in_pool": 4,
        "embedding_table_names": list(TABLES),
        "embedding_vecsize_per_table": [dim for dim, _ in TABLES.values()],
        "maxnum_catfeature_query_per_table_per_sample": [2, 26],
        "default_value_for_each_table": [value for _, value in TABLES.values()],
        "deployed_device_list": [0],
        "max_batch_size": 1024,
        "gpucache": True,
        **changes,
    }
    document = {
        "supportlonglong": True,
        "volatile_db": {"type": "parallel_hash_map"},
        "models": [{name: value for name, value in model.items() if value is not None}],
    }
    (root / "ps.json").write_text(json.dumps(document))
    return root / "ps.json"


@pytest.mark.parametrize(
    "missing",
    [{}, {"embedding_vecsize_per_table": None}, {"embedding_table_names": None}],
    ids=["all", "dims", "names"],
)
@pytest.mark.parametrize("inside", ["/model/wdl/1", "wdl/1"], ids=["of a container", "relative"])
def test_tables_names_dims_and_defaults(tmp_path: Path, inside: str, missing: dict[str, Any]) -> None:
    (model,) = read_ps_json(hps(tmp_path, inside, **missing))
    assert model.name == "wdl"
    out = import_tables(model.tables, model=model.name, out=tmp_path / "s", version=1)
    manifest = open_snapshot(out).manifest
    assert [(t.name, t.dim, t.default) for t in manifest.tables] == [
        ("sparse_embedding1", 3, (1.0, 1.0, 1.0)),
        ("sparse_embedding2", 2, "zeros"),
    ]
    assert [(f.name, f.table, f.combiner) for f in manifest.features] == [(t, t, None) for t in TABLES]
    assert rows_of(out, "sparse_embedding2")[4] == [9.0, 10.0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sparse_files": ["only.model"]}, "model 'wdl': expected 1 embedding_table_names, one per sparse file, got 2"),
        ({"default_value_for_each_table": [1.0]}, "expected 2 default_value_for_each_table, .*got 1"),
        ({"model": None}, "expected an HPS configuration: models.0.model: Field required"),
    ],
)
def test_a_file_that_does_not_add_up(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(SnapshotError, match=f"ps.json: .*{reason}"):
        read_ps_json(hps(tmp_path, **changes))


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    (model,) = read_ps_json(hps(tmp_path, sparse_files=["/gone/a.model", "/gone/b.model"]))
    with pytest.raises(SnapshotError, match=r"/gone/a.model: is missing"):
        import_tables(model.tables, model=model.name, out=tmp_path / "s")


def test_a_vector_size_that_the_files_do_not_have(tmp_path: Path) -> None:
    (model,) = read_ps_json(hps(tmp_path, embedding_vecsize_per_table=[4, 2]))
    with pytest.raises(SnapshotError, match=r"emb_vector: expected 80 bytes \(5 rows of 4 float32\), got 60"):
        import_tables(model.tables, model=model.name, out=tmp_path / "s")
