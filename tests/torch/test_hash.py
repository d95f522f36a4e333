"""Modules that hash keys in forward: requests have the keys themselves, and scores are the module's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make trainers")
pytest.importorskip("onnxscript", reason="onnxscript is not installed: make trainers")
pytest.importorskip("onnxruntime", reason="needs the extra `dense`")

import torch
import xxhash
from torch import nn

import tierstore
from tierstore.errors import InvalidInput
from tierstore.torch import HashKeys, TouchedRows, swap_embeddings, write_delta, write_snapshot

ROWS = 40


class Net(nn.Module):
    """Ids of any size into tables of 40 rows: one by XXH3, bags by the remainder, and a table of its own without a hash."""

    def __init__(self) -> None:
        super().__init__()
        self.hashed, self.remainder = HashKeys(ROWS, seed=7), HashKeys(ROWS)
        self.item = nn.Embedding(ROWS, 8, padding_idx=3)
        self.clicked = nn.EmbeddingBag(ROWS, 8, mode="mean")
        self.hour = nn.Embedding(24, 4)
        self.top = nn.Linear(20, 1)

    def forward(self, item_id: Any, clicked: Any, clicked_at: Any, hour: Any) -> Any:
        bags = self.clicked(self.remainder(clicked), clicked_at)
        rows = [self.item(self.hashed(item_id)), bags, self.hour(hour)]
        return torch.sigmoid(self.top(torch.cat(rows, 1))).squeeze(1)


def inputs(n: int = 6, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "item_id": torch.from_numpy(rng.integers(-(1 << 63), (1 << 63) - 1, n)),
        "clicked": torch.from_numpy(rng.integers(-(1 << 63), (1 << 63) - 1, 3 * n)),
        "clicked_at": torch.arange(n) * 3,
        "hour": torch.from_numpy(rng.integers(0, 24, n)),
    }


def request(values: dict[str, Any]) -> dict[str, Any]:
    arrays = {name: value.numpy() for name, value in values.items()}
    offsets = arrays.pop("clicked_at")
    return {**arrays, "clicked": (arrays["clicked"], offsets)}


def scores(net: nn.Module, values: dict[str, Any]) -> Any:
    with torch.inference_mode():
        return net.eval()(**values).numpy()


@pytest.mark.parametrize("mod", [1, 40, 1000, (1 << 61) + 5, 1 << 62])
def test_a_module_hashes_as_the_definition_says(mod: int) -> None:
    keys = [0, 1, -1, 17, (1 << 63) - 1, -(1 << 63), *range(1000, 1200)]
    for seed in (0, 7, (1 << 64) - 1):
        wanted = [xxhash.xxh3_64_intdigest(key.to_bytes(8, "little", signed=True), seed) % mod for key in keys]
        assert HashKeys(mod, seed)(torch.tensor(keys)).tolist() == wanted
    assert HashKeys(mod)(torch.tensor(keys)).tolist() == [key % mod for key in keys]
    assert HashKeys(mod, 7)(torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)).shape == (2, 2)


@pytest.mark.parametrize("mod", [1, 40, 1000, (1 << 61) + 5, 1 << 62])
def test_ids_without_a_sign_are_hashed_as_such(mod: int) -> None:
    keys = [0, 17, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, *range((1 << 63) + 5, (1 << 63) + 50)]
    unsigned = torch.tensor(np.array(keys, np.uint64))
    assert HashKeys(mod)(unsigned).tolist() == [key % mod for key in keys]
    wanted = [xxhash.xxh3_64_intdigest(key.to_bytes(8, "little"), 7) % mod for key in keys]
    assert HashKeys(mod, 7)(unsigned).tolist() == wanted


@pytest.mark.parametrize("keys", [torch.tensor([1.0]), torch.tensor([1 + 2j]), torch.tensor([True])])
def test_keys_that_are_no_integers_are_not_hashed(keys: torch.Tensor) -> None:
    with pytest.raises(InvalidInput, match=f"expected integer keys, got {keys.dtype}"):
        HashKeys(40)(keys)


def test_a_feature_hashes_ids_without_a_sign_as_its_example_has_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, keys = Net(), torch.from_numpy(np.array([5, (1 << 63) + 5, (1 << 64) - 1], np.uint64))
    values = {**inputs(3), "item_id": keys, "clicked": keys.clone(), "clicked_at": torch.arange(3)}
    write_snapshot(tmp_path / "1", net, values, model="ctr", version=1, dense=False)
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(tmp_path / "1")
        model = store.model("ctr")
        rows = model.lookup("item_id", keys.numpy())
        bags = model.lookup_bags("clicked", keys.numpy(), np.arange(3))
        with torch.inference_mode():
            np.testing.assert_allclose(rows, net.item(net.hashed(keys)).numpy(), atol=1e-6)
            np.testing.assert_allclose(bags, net.clicked(net.remainder(keys), torch.arange(3)).numpy(), atol=1e-6)
        swap_embeddings(net, model)
        np.testing.assert_array_equal(net.item(net.hashed(keys)).numpy(), rows)


@pytest.mark.thorough
def test_a_module_that_hashes_is_served_with_the_keys_themselves(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net()
    touched = TouchedRows(net)
    write_snapshot(tmp_path / "1", net, inputs(), model="ctr", version=1, touched=touched)
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(tmp_path / "1")
        model = store.model("ctr")
        for seed in range(3):
            values = inputs(seed=seed)
            np.testing.assert_allclose(model.predict(request(values)), scores(net, values), atol=1e-5)
        net.train()
        net(**inputs(seed=5)).sum().backward()
        optimizer.step()
        write_delta(tmp_path / "1.arrow", touched, model="ctr", seq=1)
        store.apply_delta(tmp_path / "1.arrow")
        keys = inputs(seed=5)["item_id"]
        with torch.inference_mode():
            wanted = net.item(net.hashed(keys)).numpy()
        np.testing.assert_allclose(model.lookup("item_id", keys.numpy()), wanted, atol=1e-6)
        store.export("ctr", tmp_path / "out", as_version=2)
        store.load_snapshot(tmp_path / "out")
        np.testing.assert_allclose(model.lookup("item_id", keys.numpy()), wanted, atol=1e-6)
        values = inputs(seed=9)
        before = scores(net, values)
        swap_embeddings(net, store.model("ctr"))
        np.testing.assert_allclose(scores(net, values), before, atol=1e-6)


@pytest.mark.thorough
def test_a_torchrec_model_whose_jagged_keys_are_hashed(tmp_path: Path) -> None:
    pytest.importorskip("torchrec", reason="TorchRec is not installed: make trainers")
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from tests.torch.test_torchrec import config, dlrm, request

    class Hashed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hash, self.inner = HashKeys(60, seed=1), dlrm(config("users", ["user"]), config("goods", ["item"]))

        def forward(self, dense_features: Any, sparse_features: Any) -> Any:
            return self.inner(dense_features, self.hash(sparse_features))

    def inputs(seed: int) -> dict[str, Any]:
        rng = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 4, (8,), generator=rng)
        values = torch.randint(-(1 << 62), 1 << 62, (int(lengths.sum()),), generator=rng)
        jagged = KeyedJaggedTensor.from_lengths_sync(keys=["user", "item"], values=values, lengths=lengths)
        return {"dense_features": torch.rand(4, 5, generator=rng), "sparse_features": jagged}

    net = Hashed()
    write_snapshot(tmp_path / "1", net, inputs(0), model="ctr", version=1)
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(tmp_path / "1")
        for seed in range(3):
            got = store.model("ctr").predict(request(inputs(seed)))
            np.testing.assert_allclose(got, scores(net, inputs(seed)), atol=1e-5)


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    for mod, seed in ((0, None), (5, -1), (1 << 63, 0), (2.5, 1)):
        with pytest.raises(InvalidInput, match="expected mod 1 to"):
            HashKeys(mod, seed)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"expected integer keys, got torch\.float32"):
        HashKeys(5)(torch.rand(3))

    class By(nn.Module):
        def __init__(self, how: Any) -> None:
            super().__init__()
            self.how, self.hash, self.a, self.b = how, HashKeys(9, 1), nn.Embedding(9, 2), nn.Embedding(9, 2)

        def forward(self, x: Any) -> Any:
            return self.how(self, x)

    def write(how: Any, **more: Any) -> None:
        write_snapshot(tmp_path / "s", By(how), {"x": torch.arange(4)}, model="m", version=1, dense=False, **more)

    with pytest.raises(InvalidInput, match=r"unchanged, or what a tierstore\.torch\.HashKeys makes of one"):
        write(lambda net, x: net.a(x % 9))
    with pytest.raises(InvalidInput, match="HashKeys is called with a value that is no argument"):
        write(lambda net, x: net.a(net.hash(x + 1)))
    with pytest.raises(InvalidInput, match="'x' is read by two tables, 'a' and 'b', or hashed in two ways"):
        write(lambda net, x: net.a(net.hash(x)) + net.b(net.hash(x)))
    with pytest.raises(InvalidInput, match="table 'a' is read through HashKeys"):
        write(lambda net, x: net.a(net.hash(x)), keys={"a": np.arange(9)})
    assert not (tmp_path / "s").exists()


def test_tables_are_swapped_only_where_the_store_hashes_alike(tmp_path: Path) -> None:
    with tierstore.SnapshotWriter(tmp_path / "s", model="m", version=1) as writer:
        writer.table("0", dim=2).write(np.arange(9), np.ones((9, 2)))
        writer.feature("hashed", table="0", hash={"mod": 9, "seed": 2})
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(tmp_path / "s")
        for net in (nn.Sequential(nn.Embedding(9, 2)),):
            with pytest.raises(
                InvalidInput, match="expected features that hash keys as the module does, not at all; got"
            ):
                swap_embeddings(net, store.model("m"))
            assert isinstance(net[0], nn.Embedding)
