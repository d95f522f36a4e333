"""Checkpoints as trainers leave them: read as they are, each row right; those that are cut or incomplete are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tierstore.errors import MissingExtra, SnapshotError
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.imports.raw_pairs import pairs_in

HERE = Path(__file__).parent / "checkpoints"
ROWS = np.arange(12, dtype=np.float32).reshape(4, 3) / 4


def rows_of(where: Path, table: str = "item") -> dict[int, list[float]]:
    """The rows of a snapshot, by key."""
    rows: dict[int, list[float]] = {}
    snapshot = open_snapshot(where)
    shards = next(one for one in snapshot.manifest.tables if one.name == table).shards
    for number in range(len(shards)):
        for batch in snapshot.batches(table, number):
            rows |= dict(zip(batch.keys.tolist(), batch.vectors.tolist(), strict=True))
    return rows


def imported(tmp_path: Path, source: Any, **options: Any) -> dict[int, list[float]]:
    out = tmp_path / f"snapshot-{len(list(tmp_path.glob('snapshot-*')))}"
    return rows_of(tierstore.import_table(source, model="m", table="item", out=out, **options))


def dynamicemb(folder: Path, table: str, keys: np.ndarray, rows: np.ndarray, ranks: int) -> None:
    """Files as dynamicemb's dump leaves them: each rank the keys that are its number modulo their count."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        mine = keys % ranks == rank
        tail = f"rank_{rank}.world_size_{ranks}"
        keys[mine].astype("<i8").tofile(folder / f"{table}_emb_keys.{tail}")
        rows[mine].astype("<f4").tofile(folder / f"{table}_emb_values.{tail}")
        np.zeros(int(mine.sum()), "<u8").tofile(folder / f"{table}_emb_scores.{tail}")
    (folder / f"{table}_opt_args.json").write_text("{}")


def test_a_table_that_tfra_has_saved(tmp_path: Path) -> None:
    assert imported(tmp_path, HERE / "tfra", dim=ROWS.shape[1]) == dict(
        zip([7, -3, 2**62, 0], ROWS.tolist(), strict=True)
    )


def test_a_table_that_tfra_has_saved_from_two_devices(tmp_path: Path) -> None:
    assert imported(tmp_path, HERE / "tfra_sharded", dim=2) == {key: [2.0 * key, 2.0 * key + 1] for key in range(6)}


def test_tables_of_dynamicemb_side_by_side_are_named_behind_the_directory(tmp_path: Path) -> None:
    keys, rows = np.arange(100), np.random.default_rng(1).normal(size=(100, 4)).astype(np.float32)
    dynamicemb(tmp_path / "dump", "item", keys, rows, 3)
    dynamicemb(tmp_path / "dump", "user", keys + 5, rows, 3)
    assert set(pairs_in(tmp_path / "dump")) == {"item", "user"}
    assert imported(tmp_path, tmp_path / "dump/item") == dict(enumerate(rows.tolist()))
    with pytest.raises(SnapshotError, match=r"holds the tables item, user: name one, as .*dump/item"):
        imported(tmp_path, tmp_path / "dump")


def test_a_rank_that_is_missing_and_a_file_that_was_cut_are_refused(tmp_path: Path) -> None:
    keys, rows = np.arange(100), np.ones((100, 4), np.float32)
    dynamicemb(tmp_path / "dump", "item", keys, rows, 3)
    values = tmp_path / "dump/item_emb_values.rank_1.world_size_3"
    whole = values.read_bytes()
    values.write_bytes(whole[:-2])
    with pytest.raises(SnapshotError, match=r"rank_1.*expected int64 keys and as many rows of float32"):
        imported(tmp_path, tmp_path / "dump")
    values.unlink()
    with pytest.raises(SnapshotError, match=r"item_emb_values.rank_1.world_size_3: is missing"):
        imported(tmp_path, tmp_path / "dump")
    values.write_bytes(whole)
    (tmp_path / "dump/item_emb_keys.rank_2.world_size_3").unlink()
    with pytest.raises(SnapshotError, match="expected 3 parts, as the names of the files say, got 2"):
        imported(tmp_path, tmp_path / "dump")
    assert not list(tmp_path.glob("snapshot-*"))


def safetensors(path: Path, tensors: dict[str, np.ndarray], bfloat16: tuple[str, ...] = ()) -> Path:
    import json

    header, at, data = {}, 0, b""
    for name, array in tensors.items():
        kind = "BF16" if name in bfloat16 else {"f4": "F32", "f2": "F16", "i8": "I64", "i4": "I32"}[array.dtype.str[1:]]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at, data = at + array.nbytes, data + array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_a_state_dict_in_safetensors_has_its_rows_numbers_for_keys(tmp_path: Path) -> None:
    weights = {"item_emb.weight": ROWS, "out.weight": np.ones((1, 7), np.float32), "out.bias": np.ones(1, np.float32)}
    file = safetensors(tmp_path / "model.safetensors", weights)
    assert imported(tmp_path, file, vector="item_emb.weight") == dict(enumerate(ROWS.tolist()))
    with pytest.raises(
        SnapshotError, match=r"no tensor 'vector' of 2 dimensions; .*item_emb.weight \[4, 3\], out.weight"
    ):
        imported(tmp_path, file)


def test_keys_may_be_a_tensor_of_their_own_and_rows_bfloat16(tmp_path: Path) -> None:
    upper = (ROWS.view(np.uint32) >> 16).astype(np.uint16)
    tensors = {"ids": np.array([9, 8, 7, 6]), "rows": upper.view(np.float16)}
    file = safetensors(tmp_path / "model.safetensors", tensors, bfloat16=("rows",))
    assert imported(tmp_path, file, key="ids", vector="rows") == dict(zip([9, 8, 7, 6], ROWS.tolist(), strict=True))
    few = safetensors(tmp_path / "few.safetensors", {"ids": np.arange(3), "rows": ROWS})
    with pytest.raises(SnapshotError, match="expected a key for each row, got 3 keys and 4 rows"):
        imported(tmp_path, few, key="ids", vector="rows")


def test_a_shard_of_ours_is_taken_too(tmp_path: Path) -> None:
    file = safetensors(tmp_path / "part.safetensors", {"keys": np.array([5, 4, 3, 2]), "vectors": ROWS})
    assert imported(tmp_path, file) == dict(zip([5, 4, 3, 2], ROWS.tolist(), strict=True))


def test_word2vecs_binary_form_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "vectors.bin").write_bytes(b"4 3\nthe " + ROWS[0].tobytes())
    with pytest.raises(SnapshotError, match=r"word2vec's binary form: save it as text.*binary=False"):
        imported(tmp_path, tmp_path / "vectors.bin")


def test_without_pytorch_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(MissingExtra, match=r"pip install torch; or save as \.safetensors"):
        imported(tmp_path, tmp_path / "model.pt")


def test_a_state_dict_that_pytorch_has_saved(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make trainers")
    model = torch.nn.ModuleDict({"item": torch.nn.Embedding(50, 4), "head": torch.nn.Linear(4, 1)})
    expected = dict(enumerate(model["item"].weight.detach().numpy().tolist()))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert imported(tmp_path, tmp_path / "model.pt", vector="item.weight") == expected
    torch.save({"epoch": 3, "model": model.state_dict()}, tmp_path / "whole.pth")
    assert imported(tmp_path, tmp_path / "whole.pth", vector="model.item.weight") == expected
    half = {"item.weight": model["item"].weight.detach().bfloat16()}
    torch.save(half, tmp_path / "half.pt")
    rows = imported(tmp_path, tmp_path / "half.pt", vector="item.weight")
    assert rows == dict(enumerate(half["item.weight"].float().numpy().tolist()))


def test_codes_that_pytorch_has_saved_are_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make trainers")
    codes, scale = torch.arange(12).reshape(4, 3).to(torch.uint8), torch.ones(4)
    narrow = torch.ones(4, 3).to(torch.float8_e4m3fn)
    refused = {
        r"got uint8: the codes .*w_qscale \[4\], w_qbias \[4\] beside it": {
            "w": codes,
            "w_qscale": scale,
            "w_qbias": scale,
        },
        "got quint8; save the numbers": {"w": torch.quantize_per_tensor(torch.ones(4, 3), 0.5, 0, torch.quint8)},
        r"got float8_e4m3fn: the codes .*w_scale_inv \[4\] beside it": {"w": narrow, "w_scale_inv": scale},
    }
    for reason, tensors in refused.items():
        torch.save(tensors, tmp_path / "model.pt")
        with pytest.raises(SnapshotError, match=reason):
            imported(tmp_path, tmp_path / "model.pt", vector="w")
    torch.save({"w": narrow}, tmp_path / "model.pt")
    assert imported(tmp_path, tmp_path / "model.pt", vector="w") == dict.fromkeys(range(4), [1.0] * 3)


def test_a_folder_of_files_that_pytorch_has_saved(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make trainers")
    (tmp_path / "model").mkdir()
    torch.save({"item.weight": torch.tensor(ROWS)}, tmp_path / "model/pytorch_model-1.bin")
    torch.save({"head.weight": torch.ones(1, 3)}, tmp_path / "model/pytorch_model-2.bin")
    (tmp_path / "model/config.json").write_text("{}")
    assert imported(tmp_path, tmp_path / "model", vector="item.weight") == dict(enumerate(ROWS.tolist()))


def test_a_pickle_with_more_than_tensors_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make trainers")
    torch.save({"item.weight": torch.ones(2, 2), "path": Path("x")}, tmp_path / "model.pt")
    with pytest.raises(SnapshotError, match=r"weights_only.*save model\.state_dict\(\)"):
        imported(tmp_path, tmp_path / "model.pt", vector="item.weight")


def test_a_checkpoint_of_lightning_has_its_weights_under_the_modules_names(tmp_path: Path) -> None:
    """Beside them lie states of optimizers, callbacks and hyperparameters; an object among those is not unpickled."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make trainers")
    weights = {"net.item.weight": torch.tensor(ROWS), "net.head.weight": torch.ones(1, 3)}
    states = [{"state": {0: {"exp_avg": torch.zeros(len(ROWS), 3)}}, "param_groups": [{"lr": 0.001}]}]
    content = {
        "epoch": 0, "pytorch-lightning_version": "2.6.6", "state_dict": weights, "optimizer_states": states,
        "callbacks": {"EarlyStopping{}": {"best_score": torch.tensor(0.5)}}, "hyper_parameters": {"dim": 3},
    }  # fmt: skip
    torch.save(content, tmp_path / "epoch=0-step=5.ckpt")
    expected = dict(enumerate(ROWS.tolist()))
    assert imported(tmp_path, tmp_path / "epoch=0-step=5.ckpt", vector="net.item.weight") == expected
    with pytest.raises(
        SnapshotError, match=r"name one by --vector \(vector=\): net.item.weight \[\d+, 3\], net.head.weight \[1, 3\]$"
    ):
        imported(tmp_path, tmp_path / "epoch=0-step=5.ckpt")
    (tmp_path / "model").mkdir()
    torch.save(weights, tmp_path / "model/model.pt")
    (tmp_path / "model/last.ckpt").write_bytes(b"another program's")
    assert imported(tmp_path, tmp_path / "model", vector="net.item.weight") == expected
    torch.save(content | {"hyper_parameters": {"root": Path("x")}}, tmp_path / "last.ckpt")
    conversion = r"holds pathlib.PosixPath, which only unpickling reads; (?:if you trust who wrote it, write its weights alone: )(.*)$"
    with pytest.raises(SnapshotError, match=conversion) as refused:
        imported(tmp_path, tmp_path / "last.ckpt", vector="net.item.weight")
    program = str(refused.value).rpartition("alone: ")[2].replace("'last", f"'{tmp_path}/last").replace("'weights", f"'{tmp_path}/weights")  # fmt: skip
    exec(program, {"torch": torch})
    assert imported(tmp_path, tmp_path / "weights.pt", vector="net.item.weight") == expected


def test_a_distributed_checkpoint(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make trainers")
    from torch.distributed import checkpoint

    weight = torch.arange(200, dtype=torch.float32).reshape(50, 4)
    state = {"model": {"ebc.embedding_bags.item.weight": weight, "over.weight": torch.ones(2, 3)}}
    checkpoint.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    name = "model.ebc.embedding_bags.item.weight"
    assert imported(tmp_path, tmp_path / "dcp", vector=name) == dict(enumerate(weight.numpy().tolist()))
    with pytest.raises(SnapshotError, match=r"no tensor 'vector'.*embedding_bags\.item\.weight \[50, 4\]"):
        imported(tmp_path, tmp_path / "dcp")
