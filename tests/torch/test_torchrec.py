"""TorchRec: a DLRM of its collections is served as it is, by snapshot, by delta, and with its tables read from a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrec", reason="TorchRec is not installed: make trainers")
pytest.importorskip("onnxscript", reason="onnxscript is not installed: make trainers")
pytest.importorskip("onnxruntime", reason="needs the extra `dense`")

import torch
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import tierstore
from tierstore.errors import InvalidInput
from tierstore.torch import TouchedRows, export_dense, swap_embeddings, write_delta, write_snapshot

pytestmark = pytest.mark.thorough
KEYS = ["user", "item", "clicked"]


def config(name: str, features: list[str], **options: Any) -> Any:
    return EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=60, feature_names=features, **options)


def dlrm(*configs: Any) -> Any:
    torch.manual_seed(5)
    tables = configs or (
        config("users", ["user"]),
        config("goods", ["item", "clicked"], pooling=PoolingType.MEAN),
    )
    collection = EmbeddingBagCollection(device=torch.device("cpu"), tables=list(tables))
    return DLRM(collection, dense_in_features=5, dense_arch_layer_sizes=[16, 8], over_arch_layer_sizes=[16, 1])


def inputs(seed: int = 0) -> dict[str, Any]:
    """Four items; their last feature has bags of 0 to 4 keys."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.cat([torch.ones(8, dtype=torch.int64), torch.randint(0, 5, (4,), generator=rng)])
    values = torch.randint(0, 60, (int(lengths.sum()),), generator=rng)
    jagged = KeyedJaggedTensor.from_lengths_sync(keys=KEYS, values=values, lengths=lengths)
    return {"dense_features": torch.rand(4, 5, generator=rng), "sparse_features": jagged}


def request(values: dict[str, Any]) -> dict[str, Any]:
    bags = {
        name: (one.values().numpy(), one.offsets()[:-1].numpy())
        for name, one in values["sparse_features"].to_dict().items()
    }
    return {"dense_features": values["dense_features"].numpy(), **bags}


def scores(net: Any, values: dict[str, Any]) -> Any:
    with torch.no_grad():
        return net.eval()(**values).numpy()


def test_a_dlrm_is_served_and_follows_its_training(tmp_path: Path) -> None:
    net = dlrm()
    touched = TouchedRows(net)
    write_snapshot(tmp_path / "1", net, inputs(), model="ctr", version=1, touched=touched)
    with tierstore.open(tmp_path / "data") as store:
        store.load_snapshot(tmp_path / "1")
        model = store.model("ctr")
        assert {name: spec.table for name, spec in model.features.items()} == {
            "user": "users",
            "item": "goods",
            "clicked": "goods",
        }
        for seed in range(3):
            np.testing.assert_allclose(model.predict(request(inputs(seed))), scores(net, inputs(seed)), atol=1e-5)
        optimizer = torch.optim.SGD(net.parameters(), 0.5)
        net.train()
        net(**inputs(7)).square().sum().backward()
        optimizer.step()
        rows = write_delta(tmp_path / "1.arrow", touched, model="ctr", seq=1, dense=export_dense(net, inputs()))
        distinct = [set(keys.tolist()) for keys, _ in (request(inputs(7))[name] for name in KEYS)]
        assert rows == len(distinct[0]) + len(distinct[1] | distinct[2])
        store.apply_delta(tmp_path / "1.arrow")
        for seed in (0, 7):
            np.testing.assert_allclose(model.predict(request(inputs(seed))), scores(net, inputs(seed)), atol=1e-5)
        wanted = scores(net, inputs(7))
        swap_embeddings(net, model)
        np.testing.assert_allclose(scores(net, inputs(7)), wanted, atol=1e-6)


def test_weights_of_bags(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            tables = [config("goods", ["item"])]
            self.bags = EmbeddingBagCollection(device=torch.device("cpu"), tables=tables, is_weighted=True)

        def forward(self, jagged: Any) -> Any:
            return self.bags(jagged).values().sum(1)

    net, lengths = Net(), torch.tensor([2, 0, 3])
    jagged = KeyedJaggedTensor.from_lengths_sync(
        keys=["item"], values=torch.arange(5), lengths=lengths, weights=torch.rand(5)
    )
    write_snapshot(tmp_path / "1", net, {"jagged": jagged}, model="ctr", version=1)
    with tierstore.open(tmp_path / "data") as store:
        store.load_snapshot(tmp_path / "1")
        bags = jagged.values().numpy(), np.array([0, 2, 2]), jagged.weights().numpy()
        wanted = net(jagged).detach().numpy()
        np.testing.assert_allclose(store.model("ctr").predict({"item": bags}), wanted, atol=1e-6)


def test_sequences_are_written_without_a_dense_part_and_followed(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            one = EmbeddingConfig(name="goods", embedding_dim=8, num_embeddings=60, feature_names=["item"])
            self.rows = EmbeddingCollection(device=torch.device("cpu"), tables=[one])

        def forward(self, jagged: Any) -> Any:
            return self.rows(jagged)["item"].values().sum()

    net = Net()
    jagged = KeyedJaggedTensor.from_lengths_sync(keys=["item"], values=torch.arange(5), lengths=torch.tensor([2, 3]))
    with pytest.raises(InvalidInput, match="features item are sequences of an EmbeddingCollection"):
        write_snapshot(tmp_path / "1", net, {"jagged": jagged}, model="ctr", version=1)
    write_snapshot(tmp_path / "1", net, {"jagged": jagged}, model="ctr", version=1, dense=False)
    with tierstore.open(tmp_path / "data") as store:
        store.load_snapshot(tmp_path / "1")
        rows = net.rows.embeddings["goods"].weight.detach().numpy()
        np.testing.assert_array_equal(store.model("ctr").lookup("item", np.arange(60)), rows)
        touched, optimizer = TouchedRows(net), torch.optim.Adagrad(net.parameters(), 0.5)
        net.train()(jagged).square().backward()
        optimizer.step()
        assert write_delta(tmp_path / "1.arrow", touched, model="ctr", seq=1) == 5
        store.apply_delta(tmp_path / "1.arrow")
        rows = net.rows.embeddings["goods"].weight.detach().numpy()
        np.testing.assert_array_equal(store.model("ctr").lookup("item", np.arange(60)), rows)
        wanted = net(jagged).item()
        swap_embeddings(net, store.model("ctr"))
        assert net(jagged).item() == pytest.approx(wanted, abs=1e-5)


def test_a_feature_of_two_tables_is_refused(tmp_path: Path) -> None:
    net = dlrm(config("one", ["user", "item"]), config("other", ["item", "clicked"]))
    with pytest.raises(InvalidInput, match="feature 'item' is read by two tables"):
        write_snapshot(tmp_path / "1", net, inputs(), model="ctr", version=1, dense=False)
