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
import tierstore.torch
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


class Pooled(torch.nn.Module):
    """One collection, and the sum of what it returns."""

    def __init__(self, bags: Any) -> None:
        super().__init__()
        self.bags = bags

    def forward(self, jagged: Any) -> Any:
        return self.bags(jagged).values().sum(1)


def collection(*configs: Any, of: Any = EmbeddingBagCollection, **options: Any) -> Any:
    torch.manual_seed(5)
    return of(device=torch.device("cpu"), tables=list(configs) or [config("goods", ["item"])], **options)


def weighted_jagged() -> Any:
    return KeyedJaggedTensor.from_lengths_sync(
        keys=["item"], values=torch.arange(5), lengths=torch.tensor([2, 0, 3]), weights=torch.rand(5) + 1
    )


def test_weights_that_an_unweighted_collection_ignores(tmp_path: Path) -> None:
    net, jagged = Pooled(collection()), weighted_jagged()
    write_snapshot(tmp_path / "1", net, {"jagged": jagged}, model="ctr", version=1)
    assert set(np.load(tmp_path / "1/warmup/requests/00000.npz").files) == {"item", "item.offsets"}
    with tierstore.open(tmp_path / "data") as store:
        store.load_snapshot(tmp_path / "1")
        model = store.model("ctr")
        for is_weighted in (False, True):
            wanted = collection(is_weighted=is_weighted)(jagged)["item"]
            ours = tierstore.torch.EmbeddingBagCollection(model, ["item"], is_weighted=is_weighted).eval()
            torch.testing.assert_close(ours(jagged)["item"], wanted.detach())
        plain = KeyedJaggedTensor.from_lengths_sync(keys=["item"], values=torch.arange(2), lengths=torch.tensor([2]))
        with pytest.raises(InvalidInput, match="'item': expected weights, as the collection is weighted"):
            ours(plain)


def variable_batches() -> Any:
    """Two features with one and three bags, of which four items have some."""
    return KeyedJaggedTensor(
        keys=["item", "user"],
        values=torch.tensor([5, 6, 7, 1, 2, 3]),
        lengths=torch.tensor([2, 1, 2, 1]),
        stride_per_key_per_rank=[[1], [3]],
        inverse_indices=(["item", "user"], torch.tensor([[0, 0, 0, 0], [2, 0, 1, 2]])),
    )


def test_batches_of_each_feature_become_those_of_the_items(tmp_path: Path) -> None:
    net = Pooled(collection(config("users", ["user"]), config("goods", ["item"])))
    jagged = variable_batches()
    with pytest.raises(InvalidInput, match="'jagged': expected a KeyedJaggedTensor with one batch for all features"):
        write_snapshot(tmp_path / "1", net, {"jagged": jagged}, model="ctr", version=1)
    even = KeyedJaggedTensor.from_lengths_sync(
        keys=["item", "user"], values=torch.arange(4), lengths=torch.ones(4, dtype=torch.int64)
    )
    write_snapshot(tmp_path / "1", net, {"jagged": even}, model="ctr", version=1)
    with tierstore.open(tmp_path / "data") as store:
        store.load_snapshot(tmp_path / "1")
        model = store.model("ctr")
        wanted = net.bags(jagged).to_dict()
        ours = tierstore.torch.EmbeddingBagCollection(model, ["user", "item"]).eval()(jagged)
        assert ours.keys() == ["user", "item"]
        for name, rows in wanted.items():
            assert rows.shape == (4, 8)
            torch.testing.assert_close(ours[name], rows.detach())
        scored = scores(net, {"jagged": jagged})
        np.testing.assert_allclose(scores(swap_embeddings(net, model), {"jagged": jagged}), scored, rtol=1e-5)


def test_collections_that_do_something_else_are_refused(tmp_path: Path) -> None:
    class Doubled(EmbeddingBagCollection):
        def forward(self, features: Any) -> Any:
            return super().forward(features.__class__(features.keys(), features.values() % 7, features.weights_or_none(), features.lengths()))  # fmt: skip

    jagged = {"jagged": weighted_jagged()}
    with pytest.raises(InvalidInput, match="Doubled is a collection of TorchRec with a forward of its own"):
        write_snapshot(tmp_path / "1", Pooled(collection(of=Doubled)), jagged, model="ctr", version=1, dense=False)
    with pytest.raises(InvalidInput, match="Doubled is a collection of TorchRec with a forward of its own"):
        TouchedRows(Pooled(collection(of=Doubled)))
    hooked = Pooled(collection())
    hooked.bags.embedding_bags["goods"].register_forward_hook(lambda _, given, rows: rows * 2)
    with pytest.raises(InvalidInput, match="table 'goods' answers feature 'item' with something else than the rows"):
        write_snapshot(tmp_path / "1", hooked, jagged, model="ctr", version=1, dense=False)


class Managed(torch.nn.Module):
    """A collection behind managed collisions."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
        from torchrec.modules.mc_modules import ManagedCollisionCollection

        tables = [EmbeddingBagConfig(name="item", embedding_dim=4, num_embeddings=8, feature_names=["item"])]
        bags = EmbeddingBagCollection(device=torch.device("cpu"), tables=tables)
        self.rows = ManagedCollisionEmbeddingBagCollection(bags, ManagedCollisionCollection({"item": module}, tables))

    def forward(self, jagged: Any) -> Any:
        return self.rows(jagged)[0].values()


def mch(**options: Any) -> Any:
    from torchrec.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule

    return MCHManagedCollisionModule(
        zch_size=8, device=torch.device("cpu"), eviction_policy=LFU_EvictionPolicy(), eviction_interval=1, **options
    )


def jagged_of(*ids: int) -> Any:
    """One id a bag."""
    return KeyedJaggedTensor.from_lengths_sync(
        keys=["item"], values=torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64)
    )


def trained(net: Managed) -> Managed:
    """Seen ids in an order in which they and their slots are not sorted alike."""
    for ids in ((900, 900, 900), (500, 500), (700, 30, 900), (1 << 40, 500, 30)):
        net.train()(jagged_of(*ids))
    return net.eval()


@pytest.mark.parametrize("hashed", [False, True])
def test_managed_collisions_are_left_out_where_a_store_is_keyed_by_ids(tmp_path: Path, hashed: bool) -> None:
    options = {"input_hash_func": lambda ids, size: ids * 3 % size} if hashed else {}
    net = trained(Managed(mch(**options)))
    module = net.rows._managed_collision_collection._managed_collision_modules["item"]
    ids = module._mch_sorted_raw_ids.numpy().copy()
    slots, weight = module._mch_remapped_ids_mapping.numpy().copy(), net.rows._embedding_module.embedding_bags["item"].weight.detach().numpy().copy()  # fmt: skip
    known = ids != np.iinfo(np.int64).max
    assert known.sum() >= 4
    with tierstore.SnapshotWriter(tmp_path / "ids", model="ctr", version=1) as writer:
        table = writer.table("item", dim=4, default=weight[-1].tolist())
        table.write(ids[known], weight[slots[known]])
        writer.feature("item", table="item", combiner="sum")
    with tierstore.SnapshotWriter(tmp_path / "slots", model="slots", version=1) as writer:
        writer.table("item", dim=4).write(np.arange(8), weight)
        writer.feature("item", table="item", combiner="sum")
    jagged = {"jagged": jagged_of(30, 500, 900, 1 << 40, 12345, 2)}
    wanted = scores(net, jagged)
    assert (wanted[:4] != wanted[4]).any()
    with tierstore.open(tmp_path / "data") as store:
        store.load_snapshot(tmp_path / "ids")
        store.load_snapshot(tmp_path / "slots")
        with pytest.raises(
            InvalidInput, match=r"keyed by the ids of its managed collisions; it has 0 of \d that were tried"
        ):
            swap_embeddings(net, store.model("slots"))
        np.testing.assert_array_equal(scores(net, jagged), wanted)
        swap_embeddings(net, store.model("ctr"))
        np.testing.assert_allclose(scores(net, jagged), wanted, rtol=1e-6)


def test_managed_collisions_are_refused_where_slots_would_be_taken_for_ids(tmp_path: Path) -> None:
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

    net = trained(Managed(mch()))
    reason = r"table 'item' has managed collisions .* looked up by slots.* Write it by raw id"
    for dense in (True, False):
        with pytest.raises(InvalidInput, match=reason):
            write_snapshot(tmp_path / "1", net, {"jagged": jagged_of(30, 500)}, model="ctr", version=1, dense=dense)
    with pytest.raises(InvalidInput, match=reason):
        TouchedRows(net)
    hashed = Managed(HashZchManagedCollisionModule(zch_size=8, device=torch.device("cpu"), total_num_buckets=1))
    with pytest.raises(InvalidInput, match=reason):
        TouchedRows(hashed)
    with tierstore.SnapshotWriter(tmp_path / "ids", model="ctr", version=1) as writer:
        writer.table("item", dim=4).write(np.arange(8), np.ones((8, 4), np.float32))
        writer.feature("item", table="item", combiner="sum")
    with tierstore.open(tmp_path / "data") as store:
        store.load_snapshot(tmp_path / "ids")
        with pytest.raises(InvalidInput, match=r"HashZch.*, which look an unknown id up by its hash"):
            swap_embeddings(hashed, store.model("ctr"))
