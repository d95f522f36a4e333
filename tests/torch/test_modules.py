"""Modules that read a store in place of a PyTorch module's own tables: the same scores, of one version a call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make trainers")

import torch
from torch import nn

import tierstore
from tests.torch.test_export import ITEMS, Net, inputs
from tierstore.client import Client
from tierstore.config import Settings
from tierstore.engine.store import Store
from tierstore.errors import InvalidInput
from tierstore.service.server import ServerThread
from tierstore.torch import Embedding, EmbeddingBag, EmbeddingBagCollection, swap_embeddings, write_snapshot


@pytest.fixture
def net() -> Net:
    torch.manual_seed(3)
    return Net()


@pytest.fixture
def store(tmp_path: Path, net: Net) -> Iterator[Store]:
    write_snapshot(tmp_path / "1", net, inputs(), model="ctr", version=1, dense=False)
    settings = Settings(data=tmp_path / "data", port=0, source_root=[str(tmp_path)])
    with Store(settings) as opened:
        opened.load_snapshot(tmp_path / "1")
        yield opened


def scores(net: nn.Module, values: dict[str, Any]) -> Any:
    with torch.inference_mode():
        return net.eval()(**values).numpy()


def test_scores_are_those_of_the_tables(net: Net, store: Store) -> None:
    wanted = [scores(net, inputs(5, seed)) for seed in range(5)]
    assert swap_embeddings(net, store.model("ctr")) is net
    assert not any(isinstance(part, (nn.Embedding, nn.EmbeddingBag)) for part in net.modules())
    for seed, of_tables in enumerate(wanted):
        np.testing.assert_array_equal(scores(net, inputs(5, seed)), of_tables)


def test_scores_over_a_service(net: Net, store: Store) -> None:
    wanted = scores(net, inputs())
    with ServerThread(store, store.settings) as server, Client(server.url) as client:
        with pytest.raises(
            InvalidInput, match=r"no feature named 'user_rows'.*there are .*user_id.*features=\{'user_rows'"
        ):
            swap_embeddings(net, client.model("ctr"))
        assert isinstance(net.item, nn.Embedding), "nothing is replaced"
        names = {"user_rows": "user_id", "item": "item_id", "clicked": "clicked"}
        swap_embeddings(net, client.model("ctr"), features=names)
        np.testing.assert_array_equal(scores(net, inputs()), wanted)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_bags_of_every_form(net: Net, store: Store, mode: str, dtype: str) -> None:
    """Against `nn.EmbeddingBag` with the same rows."""
    weight = net.clicked.weight.detach()
    model = store.model("ctr")
    keys, offsets = torch.tensor([5, 7, 7, 1, 79, 0]), torch.tensor([0, 2, 2, 5])
    cases: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
        ({}, (keys, offsets)),
        ({}, (keys.reshape(2, 3),)),
        ({"include_last_offset": True}, (keys, torch.tensor([0, 0, 4, 6]))),
        ({}, (keys.int(), offsets.int())),
        ({}, (torch.empty(0, dtype=torch.int64), torch.tensor([0, 0]))),
    ]
    if mode == "sum":
        cases.append(({}, (keys, offsets, torch.rand(6))))
        cases.append(({}, (keys.reshape(3, 2), None, torch.rand(3, 2))))
    for options, arguments in cases:
        wanted = nn.EmbeddingBag.from_pretrained(weight, mode=mode, **options)(*arguments)
        got = EmbeddingBag(model, "clicked", mode=mode, dtype=dtype, **options).eval()(*arguments)
        assert got.dtype == getattr(torch, dtype)
        torch.testing.assert_close(
            got.float(), wanted, rtol=0 if dtype == "float32" else 1e-3, atol=1e-6 if dtype == "float32" else 1e-3
        )


def test_offsets_with_an_end_have_the_end_of_the_keys(store: Store) -> None:
    """Without one, `[0, 2]` of three keys would be one bag, of which the last key is not."""
    model, keys = store.model("ctr"), torch.tensor([1, 2, 3])
    bag = EmbeddingBag(model, "clicked", include_last_offset=True).eval()
    collection = EmbeddingBagCollection(model, ["clicked"]).eval()
    for offsets in (torch.tensor([0, 2]), torch.tensor([0, 2, 4]), torch.tensor([], dtype=torch.int64)):
        with pytest.raises(InvalidInput, match=r"offsets with an end: expected 3 as the last, the number of keys, got"):
            bag(keys, offsets)
        with pytest.raises(InvalidInput, match=r"'clicked': offsets with an end: expected 3 as the last"):
            collection(KeyedJagged(clicked=Jagged(keys, offsets)))


def test_rows_of_keys_of_any_shape(net: Net, store: Store) -> None:
    module = Embedding(store.model("ctr"), "user_id").eval()
    for shape in ((), (3,), (2, 3), (2, 1, 2), (0,), (0, 4)):
        keys = torch.randint(0, 50, shape)
        assert torch.equal(module(keys), net.user["rows"](keys))
    assert torch.equal(module(torch.tensor([-5, 1 << 40])), torch.zeros(2, 4)), "keys that the table lacks"


def test_rows_are_not_copied() -> None:
    rows = np.ones((3, 4), np.float32)

    class Held:
        def lookup(self, feature: str, keys: Any, **options: Any) -> Any:
            return rows

    assert Embedding(Held(), "user").eval()(torch.arange(3)).data_ptr() == rows.ctypes.data  # type: ignore[arg-type]


def test_one_call_reads_one_version(net: Net, store: Store, tmp_path: Path) -> None:
    """A delta that comes in the midst of a call is seen by the next one; another thread sees it at once."""
    zeros = tmp_path / "zeros.arrow"
    with tierstore.DeltaWriter(zeros, model="ctr", seq=1) as delta:
        delta.upsert("item", np.arange(1, ITEMS), np.zeros((ITEMS - 1, 8), np.float32))
    seen: list[Any] = []

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.item = net.item

        def forward(self, keys: Any, *, delta: bool = False) -> Any:
            before = self.item(keys)
            if delta:
                store.apply_delta(zeros)
                other = threading.Thread(target=lambda: seen.append(self.item(keys)))
                other.start()
                other.join()
            return before, self.item(keys)

    twice = swap_embeddings(Twice(), store.model("ctr"))
    keys = torch.tensor([1, 2, 3])
    with torch.inference_mode():
        before, after = twice(keys, delta=True)
    assert before.any()
    assert torch.equal(before, after)
    assert not seen[0].any()
    assert not twice(keys)[0].any()
    assert not store.model("ctr").publisher.under_way(), "no view is held"


def test_a_call_that_fails_holds_no_view(net: Net, store: Store) -> None:
    swap_embeddings(net, store.model("ctr"))
    with pytest.raises(TypeError):
        net(**(inputs() | {"hour": None}))
    assert not store.model("ctr").publisher.under_way()


def test_training_is_refused(net: Net, store: Store) -> None:
    module = Embedding(store.model("ctr"), "user_id")
    with pytest.raises(InvalidInput, match=r"not trained.*eval\(\)"):
        module(torch.tensor([1]))
    with torch.no_grad():
        assert module(torch.tensor([1])).shape == (1, 4)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (nn.EmbeddingBag(4, 8, mode="max"), "mode 'max' is not served: expected sum or mean"),
        (nn.Embedding(4, 8, max_norm=1.0), "table 'item': max_norm changes rows when they are read"),
        (nn.Embedding(4, 8), "no feature of a table 'item' without a padding key; there are user_id, item_id, clicked"),
    ],
)
def test_tables_that_cannot_be_replaced(net: Net, store: Store, part: Any, reason: str) -> None:
    net.item = part
    with pytest.raises(InvalidInput, match=reason):
        swap_embeddings(net, store.model("ctr"), features={"clicked": "clicked"})
    assert net.item is part
    assert isinstance(net.clicked, nn.EmbeddingBag)


def test_what_is_asked_wrongly(net: Net, store: Store) -> None:
    model = store.model("ctr")
    bag = EmbeddingBag(model, "clicked", mode="mean").eval()
    with pytest.raises(InvalidInput, match=r"keys \[bags, k\] without offsets.*got keys \[2\] without offsets"):
        bag(torch.tensor([1, 2]))
    with pytest.raises(InvalidInput, match="per_sample_weights: expected mode sum"):
        bag(torch.tensor([1, 2]), torch.tensor([0]), torch.ones(2))
    with pytest.raises(InvalidInput, match="expected float32 or float16, got 'int8'"):
        EmbeddingBag(model, "clicked", dtype="int8")
    with pytest.raises(InvalidInput, match="expected tables among user_rows, item, clicked, got 'users'"):
        swap_embeddings(net, model, features={"users": "user_id"})


class Jagged:
    """The faces of TorchRec's KeyedJaggedTensor and JaggedTensor that are used."""

    def __init__(self, values: Any, offsets: Any, weights: Any = None) -> None:
        self._values, self._offsets, self._weights = values, offsets, weights

    def values(self) -> Any:
        return self._values

    def offsets(self) -> Any:
        return self._offsets

    def weights_or_none(self) -> Any:
        return self._weights


class KeyedJagged(dict[str, Any]):
    def to_dict(self) -> dict[str, Any]:
        return dict(self)


def test_bags_by_a_keyed_jagged_tensor(net: Net, store: Store) -> None:
    keys, ends = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 1, 1, 4])
    collection = EmbeddingBagCollection(store.model("ctr"), ["clicked"]).eval()
    pooled = collection(KeyedJagged(clicked=Jagged(keys, ends)))
    wanted = net.clicked(keys, ends[:-1])
    torch.testing.assert_close(pooled["clicked"], wanted, rtol=0, atol=1e-6)
    assert pooled.keys() == ["clicked"]
    assert pooled.length_per_key() == [8]
    assert torch.equal(pooled.values(), pooled.to_dict()["clicked"])
    with pytest.raises(InvalidInput, match=r"got none of \['clicked'\]; there are \['user'\]"):
        collection(KeyedJagged(user=Jagged(keys, ends)))
