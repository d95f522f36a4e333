"""Datasets of Hugging Face and of Lance: the rows that their own packages have, or what to do instead."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.imports.test_tables import rows_of
from tierstore.errors import SnapshotError
from tierstore.imports.tables import import_table

LISTS = pa.list_(pa.float32())


def rows(*keys: int) -> pa.Table:
    return pa.table({"item_id": pa.array(keys, pa.int64()), "emb": pa.array([[key, 0.5] for key in keys], LISTS)})


def expected(*keys: int) -> dict[int, list[float]]:
    return {key: [key, 0.5] for key in keys}


def imported(source: Any, out: Path, **options: Any) -> dict[int, list[float]]:
    import_table(source, model="ctr", table="item", key="item_id", vector="emb", out=out, **options)
    found = rows_of(out)
    shutil.rmtree(out)
    return found


def saved(folder: Path, parts: dict[str, pa.Table], live: list[str], **state: Any) -> Path:
    """A folder as `save_to_disk` writes it: streams, of which the state names those of the dataset."""
    folder.mkdir(parents=True)
    for name, part in parts.items():
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, part.schema) as stream:
            stream.write_table(part)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in live], **state}))
    return folder


def test_files_that_a_datasets_state_does_not_name_are_of_an_earlier_save(tmp_path: Path) -> None:
    names = [f"data-{i:05}-of-00002.arrow" for i in (0, 1)]
    later = rows(3, 1).set_column(1, "emb", pa.array([[3, 1.5], [1, 1.5]], LISTS))
    parts = {names[0]: rows(1, 2), names[1]: later, "data-00000-of-00001.arrow": rows(2, 9)}
    folder = saved(tmp_path / "items", parts, names)
    live = {1: [1, 1.5], 2: [2, 0.5], 3: [3, 1.5]}
    assert imported(folder, tmp_path / "s", on_duplicate="last") == live
    folder = saved(tmp_path / "other", parts, names[::-1])
    assert imported(folder, tmp_path / "s", on_duplicate="last") == live | {1: [1, 0.5]}


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"_indices_data_files": [{"filename": "indices.arrow"}]}, r"state.json: says that another file chooses the rows.*flatten_indices"),
        ({"_data_files": [{"filename": "../data.arrow"}]}, r"state.json: is not as save_to_disk writes it: .*not beside it"),
        ({"_data_files": 7}, r"state.json: is not as save_to_disk writes it"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, r"gone.arrow"),
    ],
)  # fmt: skip
def test_a_dataset_whose_state_cannot_be_followed_is_refused(tmp_path: Path, state: Any, reason: str) -> None:
    folder = saved(tmp_path / "items", {"data.arrow": rows(1)}, ["data.arrow"], **state)
    with pytest.raises(SnapshotError, match=reason):
        imported(folder, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_dataset_of_several_splits_is_refused_with_one_to_name(tmp_path: Path) -> None:
    for split in ("train", "test"):
        saved(tmp_path / "all" / split, {"data.arrow": rows(len(split))}, ["data.arrow"])
    (tmp_path / "all/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(SnapshotError, match=r"is a DatasetDict with splits test, train: name one, as .*/all/test"):
        imported(tmp_path / "all", tmp_path / "s")
    assert imported(tmp_path / "all/train", tmp_path / "s") == expected(5)
    with pytest.raises(SnapshotError, match=r"holds datasets of Hugging Face in 2 .*: name one, as .*/all/test"):
        imported(tmp_path, tmp_path / "s")


def test_a_dataset_has_the_rows_that_its_package_has(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    whole = datasets.Dataset(rows(*range(50)))
    chosen = whole.select([7, 3, 41])
    chosen.save_to_disk(tmp_path / "chosen")
    whole.save_to_disk(tmp_path / "whole", num_shards=3)
    assert imported(tmp_path / "chosen", tmp_path / "s") == expected(3, 7, 41)
    assert imported(tmp_path / "whole", tmp_path / "s") == expected(*range(50))
    assert imported(chosen, tmp_path / "s") == expected(3, 7, 41)
    assert imported(chosen.with_format("torch", columns=["item_id"]), tmp_path / "s") == expected(3, 7, 41)
    assert imported(datasets.concatenate_datasets([whole, chosen]), tmp_path / "s", on_duplicate="last") == expected(
        *range(50)
    )
    assert imported(whole.to_iterable_dataset().filter(lambda row: row["item_id"] < 3), tmp_path / "s") == expected(
        0, 1, 2
    )
    with pytest.raises(SnapshotError, match="at least one row"):
        imported(whole.select([]), tmp_path / "s")


def test_a_lance_dataset_is_refused_with_what_takes_its_live_rows(tmp_path: Path) -> None:
    (tmp_path / "made.lance/_versions").mkdir(parents=True)
    (tmp_path / "made.lance/_versions/1.manifest").write_bytes(b"")
    advice = r"made.lance is a Lance dataset .*(tierstore.import_table\(lance.dataset\('.*/made.lance'\), …\))"
    with pytest.raises(SnapshotError, match=advice):
        imported(tmp_path / "made.lance", tmp_path / "s")


def test_live_rows_of_a_lance_dataset(tmp_path: Path) -> None:
    lance = pytest.importorskip("lance", reason="pylance is not installed")
    lance.write_dataset(rows(*range(9)), tmp_path / "items.lance", max_rows_per_file=4)
    dataset = lance.dataset(tmp_path / "items.lance")
    dataset.delete("item_id in (2, 5)")
    assert imported(lance.dataset(tmp_path / "items.lance"), tmp_path / "s") == expected(0, 1, 3, 4, 6, 7, 8)
    with pytest.raises(SnapshotError, match="is a Lance dataset"):
        imported(tmp_path / "items.lance", tmp_path / "s")
