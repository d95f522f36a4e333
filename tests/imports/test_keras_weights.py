"""Files of Keras: each table's rows are those of the layer that is named, as Keras has them, or what is there is refused."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.imports.test_tables import rows_of
from tierstore.errors import SnapshotError
from tierstore.imports.tables import import_table

h5py = pytest.importorskip("h5py", reason="h5py is not installed: make trainers")


@pytest.fixture(scope="module")
def keras() -> Any:
    pytest.importorskip("torch", reason="PyTorch, on which Keras runs here, is not installed: make trainers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "torch")
        return pytest.importorskip("keras", reason="Keras is not installed: make trainers")


def two_tables(keras: Any, dtype: str | None = None) -> Any:
    """A model of two tables whose file would have them as `embedding` and `embedding_1`, and which the layers' names
    tell apart; compiled, so that an optimizer with arrays of the same shapes is saved too.
    """
    ids = [keras.Input((1,), dtype="int64") for _ in range(2)]
    layers = [keras.layers.Embedding(n, 4, name=name, dtype=dtype) for n, name in ((5, "user"), (6, "item"))]
    joined = keras.layers.Concatenate()([layer(one) for layer, one in zip(layers, ids, strict=True)])
    model = keras.Model(ids, keras.layers.Dense(1, name="head", dtype="float32")(joined))
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def rows_of_layer(model: Any, name: str) -> dict[int, list[float]]:
    import ml_dtypes

    rows = np.asarray(model.get_layer(name).get_weights()[0])
    return dict(enumerate(rows.astype(np.float32) if rows.dtype == ml_dtypes.bfloat16 else rows))


def imported(tmp_path: Path, source: Any, vector: str, **options: Any) -> dict[int, list[float]]:
    out = import_table(source, model="ctr", table="item", vector=vector, out=tmp_path / "s" / vector, **options)
    return rows_of(out)


def same(found: dict[int, list[float]], expected: dict[int, Any]) -> bool:
    return {key: [float(x) for x in row] for key, row in expected.items()} == found


@pytest.mark.parametrize("name", ["model.weights.h5", "model.keras"])
@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16"])
def test_tables_are_named_by_their_layers(tmp_path: Path, keras: Any, name: str, dtype: str | None) -> None:
    model = two_tables(keras, dtype)
    (model.save if name == "model.keras" else model.save_weights)(tmp_path / name)
    for layer in ("user", "item"):
        assert same(imported(tmp_path, tmp_path / name, f"{layer}.0"), rows_of_layer(model, layer))
    listed = r"name one by --vector \(vector=\): head.0 \[8, 1\], user.0 \[5, 4\], item.0 \[6, 4\]$"
    with pytest.raises(SnapshotError, match=listed):
        imported(tmp_path, tmp_path / name, "vector")


@pytest.mark.filterwarnings("ignore:.*legacy")
def test_an_earlier_file_names_variables_too(tmp_path: Path, keras: Any) -> None:
    model = two_tables(keras)
    model.save(tmp_path / "model.h5")
    for layer in ("user", "item"):
        assert same(imported(tmp_path, tmp_path / "model.h5", f"{layer}.embeddings"), rows_of_layer(model, layer))


def test_layers_of_one_name_are_told_apart_by_their_paths(tmp_path: Path, keras: Any) -> None:
    class Tables(keras.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = (keras.layers.Embedding(n, 4, name="table") for n in (5, 6))
            self.alone = keras.layers.Embedding(7, 4, name="alone")

        def call(self, ids: Any) -> Any:
            return self.user(ids) + self.item(ids) + self.alone(ids)

    model = Tables()
    model(np.array([[1]]))
    model.save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(SnapshotError, match=r"no tensor 'table.0'.* alone.0 \[7, 4\]"):
        imported(tmp_path, tmp_path / "model.weights.h5", "table.0")
    by_path = {}
    with h5py.File(tmp_path / "model.weights.h5") as file:
        file.visititems(lambda path, one: by_path.update({path: one[:]}) if hasattr(one, "shape") else None)
    paths = [path for path, rows in by_path.items() if len(rows) in (5, 6)]
    assert len(paths) == 2
    for path in paths:
        name = path.replace("/vars/", "/").replace("/", ".")
        assert same(imported(tmp_path, tmp_path / "model.weights.h5", name), dict(enumerate(by_path[path])))
    assert len(imported(tmp_path, tmp_path / "model.weights.h5", "alone.0")) == 7


def test_a_folder_of_shards_is_one_model(tmp_path: Path, keras: Any) -> None:
    model = two_tables(keras)
    (tmp_path / "model").mkdir()
    model.save_weights(tmp_path / "model/model.weights.json", max_shard_size=1.2e-7)  # GB
    assert len(list((tmp_path / "model").glob("*.h5"))) > 2
    for layer in ("user", "item"):
        assert same(imported(tmp_path, tmp_path / "model", f"{layer}.0"), rows_of_layer(model, layer))


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_codes_of_a_quantized_layer_are_refused_even_where_integers_are_meant(
    tmp_path: Path, keras: Any, mode: str
) -> None:
    model = two_tables(keras)
    model.quantize(mode)
    model.save_weights(tmp_path / "model.weights.h5")
    for integers in (False, True):
        with pytest.raises(SnapshotError, match=r"'item.0': expected rows of floats, got int8 .*before quantize\(\)"):
            imported(tmp_path, tmp_path / "model.weights.h5", "item.0", integers=integers)


def test_layers_of_one_name_in_an_earlier_file_are_told_apart(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "model.h5", "w") as file:
        for number, tower in enumerate(("user", "item")):
            file[f"model_weights/{tower}/emb/embeddings:0"] = np.full((4, 2), number, np.float32)
    with pytest.raises(SnapshotError, match=r"no tensor 'emb\.embeddings:0'"):
        imported(tmp_path, tmp_path / "model.h5", "emb.embeddings:0")
    assert imported(tmp_path, tmp_path / "model.h5", "item.emb.embeddings:0")[0] == [1.0, 1.0]


def test_many_rows_are_read_in_batches_from_within_a_zip(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(100_000, 3)).astype(np.float32)
    with h5py.File(tmp_path / "model.weights.h5", "w") as file:
        file.create_group("layers/embedding/vars")["0"] = rows
        file["layers/embedding/vars"].attrs["name"] = "item"
    with zipfile.ZipFile(tmp_path / "model.keras", "w") as archive:
        archive.writestr("config.json", "{}")
        archive.write(tmp_path / "model.weights.h5", "model.weights.h5")
    assert same(imported(tmp_path, tmp_path / "model.keras", "item.0"), dict(enumerate(rows)))


def test_files_that_are_none_of_keras_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["table"] = np.ones((3, 2))
    with h5py.File(tmp_path / "away.h5", "w") as file:
        file.create_group("layers/embedding/vars")["1"] = np.ones((3, 2), np.float32)
        external = [(str(tmp_path / "rows.bin"), 0, 24)]
        file["layers/embedding/vars"].create_dataset("0", (3, 2), "f4", external=external)
        file["layers/dense"] = h5py.ExternalLink("other.h5", "table")
    with zipfile.ZipFile(tmp_path / "empty.keras", "w") as archive:
        archive.writestr("config.json", "{}")
    with zipfile.ZipFile(tmp_path / "packed.keras", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tmp_path / "away.h5", "model.weights.h5")
    (tmp_path / "no.h5").write_bytes(b"no HDF5")
    reasons = {
        "other.h5": "expected weights that Keras saved",
        "away.h5": "'layers.embedding.0': lies in another file",
        "empty.keras": "expected model.weights.h5 in it, as Keras writes it, got config.json",
        "packed.keras": "got it compressed",
        "no.h5": "cannot be read",
    }
    for name, reason in reasons.items():
        with pytest.raises(SnapshotError, match=rf"{name}: .*{reason}"):
            imported(tmp_path, tmp_path / name, "layers.embedding.0")
    assert not (tmp_path / "s").exists()


def test_without_h5py_the_refusal_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    (tmp_path / "model.keras").write_bytes(b"")
    with pytest.raises(SnapshotError, match=r"model.keras: .*pip install 'tierstore\[h5py\]'"):
        imported(tmp_path, tmp_path / "model.keras", "item.0")
