"""Rows that a key has by way of other tensors: TorchRec's managed collisions, model2vec's vocabulary, and what lies beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.imports.make_corpus import safetensors
from tests.imports.test_tables import rows_of
from tierstore.errors import SnapshotError
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.imports.tables import import_table

FREE = (1 << 63) - 1
ROWS = np.arange(12, dtype=np.float32).reshape(6, 2) / 4
MODULE = "_managed_collision_collection._managed_collision_modules.item"
WEIGHT = "_embedding_module.embedding_bags.item.weight"
MCH = {
    WEIGHT: ROWS,
    f"{MODULE}._mch_sorted_raw_ids": np.array([5, 17, 4711, FREE, FREE, FREE]),
    f"{MODULE}._mch_remapped_ids_mapping": np.array([3, 0, 4, 1, 2, 5]),
    f"{MODULE}._mch_counts": np.array([1, 2, 3, 0, 0, FREE]),
    f"{MODULE}._output_segments_tensor": np.array([0, 6, -1, -1]),
}
BY_ID = {5: ROWS[3].tolist(), 17: ROWS[0].tolist(), 4711: ROWS[4].tolist()}


def imported(source: Any, where: Path, **options: Any) -> tuple[dict[Any, list[float]], Any]:
    """The rows of the table, and its default."""
    import_table(source, model="ctr", table="item", out=where, **options)
    return rows_of(where), open_snapshot(where).manifest.table("item").default


@pytest.mark.parametrize("key", ["key", f"{MODULE}._mch_sorted_raw_ids", f"{MODULE}._mch_remapped_ids_mapping"])
def test_rows_of_mch_have_their_ids_and_the_last_is_that_of_ids_that_are_not_there(tmp_path: Path, key: str) -> None:
    safetensors(tmp_path / "a.safetensors", MCH)
    rows, default = imported(tmp_path / "a.safetensors", tmp_path / "s", vector=WEIGHT, key=key)
    assert rows == BY_ID
    assert list(default) == ROWS[5].tolist()


def test_of_several_tables_each_has_its_own_ids(tmp_path: Path) -> None:
    others = {name.replace("item", "user"): array for name, array in MCH.items() if "segments" not in name}
    others[f"{MODULE.replace('item', 'user')}._mch_sorted_raw_ids"] = np.array([1, 2, 3, 4, 5, FREE])
    tower = {f"tower.{name}": array + (array < FREE) for name, array in MCH.items() if "segments" not in name}
    tower[f"tower.{MODULE}._mch_remapped_ids_mapping"] = MCH[f"{MODULE}._mch_remapped_ids_mapping"]
    safetensors(tmp_path / "a.safetensors", {**others, **tower, **MCH})
    assert imported(tmp_path / "a.safetensors", tmp_path / "item", vector=WEIGHT)[0] == BY_ID
    rows, _ = imported(tmp_path / "a.safetensors", tmp_path / "tower", vector=f"tower.{WEIGHT}")
    assert sorted(rows) == [6, 18, 4712]
    rows, _ = imported(tmp_path / "a.safetensors", tmp_path / "user", vector=WEIGHT.replace("item", "user"))
    assert sorted(rows) == [1, 2, 3, 4, 5]


def test_a_default_that_is_said_counts(tmp_path: Path) -> None:
    safetensors(tmp_path / "a.safetensors", MCH)
    for i, default in enumerate(("zeros", "mean", [7.0, 8.0])):
        found = imported(tmp_path / "a.safetensors", tmp_path / str(i), vector=WEIGHT, default=default)[1]
        assert (found if isinstance(default, str) else list(found)) == default


def test_the_rows_and_their_ids_may_lie_in_several_files_and_as_arrays(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    safetensors(tmp_path / "model/1.safetensors", {WEIGHT: ROWS})
    safetensors(tmp_path / "model/2.safetensors", {name: array for name, array in MCH.items() if name != WEIGHT})
    assert imported(tmp_path / "model", tmp_path / "s", vector=WEIGHT)[0] == BY_ID
    np.savez(tmp_path / "a.npz", **MCH)
    rows, default = imported(tmp_path / "a.npz", tmp_path / "arrays", vector=WEIGHT)
    assert (rows, list(default)) == (BY_ID, ROWS[5].tolist())


def test_what_was_saved_from_shards_needs_a_default(tmp_path: Path) -> None:
    """Each had a row of its own for ids that were not there."""
    safetensors(tmp_path / "a.safetensors", {**MCH, f"{MODULE}._output_segments_tensor": np.array([0, 3, 6, -1])})
    with pytest.raises(SnapshotError, match=r"each shard .* a row of its own .*--default zeros or mean \(default=\)"):
        imported(tmp_path / "a.safetensors", tmp_path / "refused", vector=WEIGHT)
    assert imported(tmp_path / "a.safetensors", tmp_path / "s", vector=WEIGHT, default="mean") == (BY_ID, "mean")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"_mch_remapped_ids_mapping": np.array([3, 3, 4, 1, 2, 5])}, "a row of its own for each id"),
        ({"_mch_remapped_ids_mapping": np.array([3, 6, 4, 1, 2, 5])}, "expected rows 0 to 5, got 6"),
        ({"_mch_remapped_ids_mapping": np.array([3, -1, 4, 1, 2, 5])}, "expected rows 0 to 5"),
        ({"_mch_sorted_raw_ids": np.array([5, FREE])}, "for each of 6 rows, got 2 ids and 6 rows"),
    ],
)
def test_ids_that_do_not_fit_their_rows_are_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    safetensors(tmp_path / "a.safetensors", MCH | {f"{MODULE}.{name}": array for name, array in change.items()})
    with pytest.raises(SnapshotError, match=reason):
        imported(tmp_path / "a.safetensors", tmp_path / "s", vector=WEIGHT)
    assert not (tmp_path / "s").exists()


def test_ids_of_a_hash_zch_need_a_default(tmp_path: Path) -> None:
    ids = np.array([[-1], [17], [-1], [5], [4711], [-1]])
    safetensors(tmp_path / "a.safetensors", {WEIGHT: ROWS, f"{MODULE}._hash_zch_identities": ids})
    with pytest.raises(SnapshotError, match=r"whichever row its hash led to.*--default zeros or mean"):
        imported(tmp_path / "a.safetensors", tmp_path / "refused", vector=WEIGHT)
    rows, _ = imported(tmp_path / "a.safetensors", tmp_path / "s", vector=WEIGHT, default="zeros")
    assert rows == {17: ROWS[1].tolist(), 5: ROWS[3].tolist(), 4711: ROWS[4].tolist()}


def test_a_bad_row_is_named_by_its_number_among_all(tmp_path: Path) -> None:
    bad = ROWS.copy()
    bad[3, 0] = np.nan
    safetensors(tmp_path / "a.safetensors", {**MCH, WEIGHT: bad})
    with pytest.raises(SnapshotError, match=r"a.safetensors, row 3: the vector holds NaN"):
        imported(tmp_path / "a.safetensors", tmp_path / "s", vector=WEIGHT)


def test_row_numbers_are_keys_where_that_is_said(tmp_path: Path) -> None:
    safetensors(tmp_path / "a.safetensors", MCH)
    rows, default = imported(tmp_path / "a.safetensors", tmp_path / "s", vector=WEIGHT, key="row_number")
    assert (rows, default) == (dict(enumerate(ROWS.tolist())), "zeros")


def test_a_module_of_torchrec_answers_as_the_table_made_of_its_state(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make trainers")
    torchrec = pytest.importorskip("torchrec", reason="TorchRec is not installed: make trainers")
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
    from torchrec.modules.mc_modules import (
        DistanceLFU_EvictionPolicy,
        ManagedCollisionCollection,
        MCHManagedCollisionModule,
    )

    torch.manual_seed(0)
    configs = [torchrec.EmbeddingBagConfig(name="item", embedding_dim=4, num_embeddings=8, feature_names=["item_id"])]
    policy = DistanceLFU_EvictionPolicy()
    mch = MCHManagedCollisionModule(zch_size=8, device=torch.device("cpu"), eviction_policy=policy, eviction_interval=2)
    collection = ManagedCollisionCollection({"item": mch}, configs)
    module = ManagedCollisionEmbeddingBagCollection(torchrec.EmbeddingBagCollection(tables=configs), collection)

    def answers(ids: list[int]) -> Any:
        ones = torch.ones(len(ids), dtype=torch.int64)
        batch = torchrec.KeyedJaggedTensor.from_lengths_sync(["item_id"], torch.tensor(ids), ones)
        return module(batch)[0].to_dict()["item_id"]

    for _ in range(6):  # more ids than have a place, so that some are evicted
        answers([99_000_001, 17, 5, 4711, 4_000_017, 17, *np.random.default_rng(_).integers(100, 200, 4).tolist()])
    module.eval()
    torch.save(module.state_dict(), tmp_path / "model.pt")
    rows, default = imported(tmp_path / "model.pt", tmp_path / "s", vector=WEIGHT)
    assert {17, 5, 4711} <= rows.keys(), "ids that came each time have a place"
    asked = [*rows, 3, 12_345]
    with torch.no_grad():
        expected = answers(asked).numpy()
    np.testing.assert_array_equal(np.float32([rows.get(one, list(default)) for one in asked]), expected)


# --- model2vec


@pytest.mark.parametrize("name", ["embeddings", "embedding.weight"])
@pytest.mark.parametrize("parts", ["mapping weights", "mapping", "weights"])
def test_tokens_of_model2vec_have_the_row_that_is_mapped_times_their_weight(
    tmp_path: Path, name: str, parts: str
) -> None:
    book, mapping = ROWS[:3], np.array([2, 0, 0, 1, 2], np.int32)
    weights = np.array([1.0, 2.0, 0.5, -1.0, 4.0], np.float32)
    tokens = book[mapping] if "mapping" in parts else ROWS[:5]
    tensors = {name: book if "mapping" in parts else ROWS[:5]}
    if "mapping" in parts:
        tensors["mapping"] = mapping
    if "weights" in parts:
        tensors["weights"] = weights
        tokens = tokens * weights[:, None]
    safetensors(tmp_path / "m/model.safetensors", tensors)
    (tmp_path / "m/config.json").write_text("{}")
    assert imported(tmp_path / "m", tmp_path / "s")[0] == dict(enumerate(tokens.tolist()))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mapping": np.array([0, 3], np.int32)}, "'mapping': expected rows 0 to 2 of 'embeddings', got 3"),
        ({"weights": np.ones(3, np.float32)}, "'weights': expected one for each of 2 tokens, got 3"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    tensors = {"embeddings": ROWS[:3], "mapping": np.array([0, 1], np.int32), **change}
    safetensors(tmp_path / "a.safetensors", tensors)
    with pytest.raises(SnapshotError, match=reason):
        imported(tmp_path / "a.safetensors", tmp_path / "s")


# --- what else lies beside


def test_integers_beside_rows_are_not_passed_over(tmp_path: Path) -> None:
    ids = np.array([9, 8, 7, 6, 5, 4])
    safetensors(tmp_path / "a.safetensors", {"emb.ids": ids, "emb.rows": ROWS, "other.ids": ids})
    with pytest.raises(SnapshotError, match=r"which key each row has: emb.ids \[6\]. --key .*--key row_number"):
        imported(tmp_path / "a.safetensors", tmp_path / "refused")
    assert list(imported(tmp_path / "a.safetensors", tmp_path / "ids", key="emb.ids")[0]) == ids.tolist()
    rows, _ = imported(tmp_path / "a.safetensors", tmp_path / "numbers", key="row_number")
    assert rows == dict(enumerate(ROWS.tolist()))
    safetensors(tmp_path / "b.safetensors", {"rows": ROWS, "index_remapping": np.arange(9)})
    with pytest.raises(SnapshotError, match=r"which key each row has: index_remapping \[9\]"):
        imported(tmp_path / "b.safetensors", tmp_path / "remapped")


def test_numbers_beside_rows_are_named_as_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    norms = np.ones((6, 1), np.float32)
    safetensors(
        tmp_path / "a.safetensors", {"item.weight_v": ROWS, "item.weight_g": norms, "head.bias": np.ones(6, np.float32)}
    )
    imported(tmp_path / "a.safetensors", tmp_path / "s", vector="item.weight_v")
    (said,) = [record.getMessage() for record in caplog.records if record.name == "tierstore.imports.tensor_rows"]
    assert "beside tensor 'item.weight_v', these were not read: item.weight_g [6, 1]" in said
    assert "head.bias" not in said
