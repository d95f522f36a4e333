"""Modules that read a store under `torch.compile` and `torch.export`, and with keys on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make trainers")

import torch
from torch import nn

from tests.engine import scenes
from tests.tiers.cuda_shim.backend import ShimDevice
from tests.tiers.devices import ON_GPU
from tierstore.config import Settings
from tierstore.engine.data import table_view
from tierstore.engine.store import Store
from tierstore.errors import InvalidInput
from tierstore.tiers.device import gpu
from tierstore.tiers.device import lookup as device_lookup
from tierstore.torch import Embedding, EmbeddingBag, modules, swap_embeddings


def open_store(folder: Path, **options: Any) -> Store:
    store = Store(Settings(data=folder / "data", port=0, source_root=[str(folder)], **options))
    store.load_snapshot(scenes.write_snapshot(folder))
    return store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as opened:
        yield opened


class Net(nn.Module):
    """Rows and bags of a store, with arithmetic around them."""

    def __init__(self, source: Any, **bags: Any) -> None:
        super().__init__()
        self.item = Embedding(source, "item_id")
        self.clicked = EmbeddingBag(source, "clicked", mode="sum", **bags)

    def forward(self, item: torch.Tensor, clicked: torch.Tensor, offsets: Any = None, weights: Any = None) -> Any:
        return (self.item(item) * 2 + 1).sum(), self.clicked(clicked, offsets, weights) - 1


def cases() -> list[tuple[dict[str, Any], tuple[Any, ...]]]:
    """(options of the bags, arguments)."""
    keys = torch.tensor([3, 5, 5, 99, 7, 0])
    return [
        ({}, (torch.tensor([[1, 2], [3, 4]]), keys.reshape(2, 3))),
        ({}, (torch.tensor([1, 2, 3]), keys, torch.tensor([0, 2, 2, 5]))),
        ({}, (torch.tensor(7), keys.int(), torch.tensor([0, 4]), torch.linspace(0, 1, 6))),
        ({"include_last_offset": True}, (torch.tensor([1]), keys, torch.tensor([0, 0, 6]))),
    ]


@pytest.mark.parametrize("case", range(4))
def test_a_compiled_module_is_one_graph_with_the_same_answers(store: Store, case: int) -> None:
    options, arguments = cases()[case]
    net = Net(store.model("ctr"), **options).eval()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        for got, wanted in zip(compiled(*arguments), net(*arguments), strict=True):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("last", [None, False, True])
def test_one_graph_takes_any_number_of_bags(store: Store, last: bool | None) -> None:
    """Keys [bags, k]; or keys [n] with offsets, of which the last one is the end or not."""
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    module = EmbeddingBag(store.model("ctr"), "clicked", mode="sum", include_last_offset=bool(last)).eval()
    compiled = torch.compile(module, backend=count, dynamic=True)
    with torch.inference_mode():
        for bags in range(3, 7):
            keys, ends = torch.arange(2 * bags), torch.arange(0, 2 * bags + 1, 2)
            given = (keys.reshape(bags, 2),) if last is None else (keys, ends if last else ends[:-1])
            torch.testing.assert_close(compiled(*given), module(*given))
    assert len(graphs) == 1


@pytest.mark.parametrize("case", range(4))
def test_an_exported_module_reads_what_is_served_when_it_runs(store: Store, case: int) -> None:
    options, arguments = cases()[case]
    net = Net(store.model("ctr"), **options).eval()
    program = torch.export.export(net, arguments)
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"tierstore.rows.default", "tierstore.bags.default"} <= names
    run = program.module()
    for seq in range(2):
        for got, wanted in zip(run(*arguments), net(*arguments), strict=True):
            torch.testing.assert_close(got, wanted)
        before = wanted
        store.apply_delta(scenes.stamped(seq + 1, {"item": np.arange(0, 100)}))
    assert not torch.equal(net(*arguments)[1], before)


def test_a_graph_whose_module_is_gone_says_so(store: Store) -> None:
    module = Embedding(store.model("ctr"), "item_id").eval()
    run = torch.export.export(module, (torch.tensor([1, 2]),)).module()
    number = module.number
    del module, run
    gc.collect()
    with pytest.raises(InvalidInput, match="runs in the process that made it"):
        torch.ops.tierstore.rows(torch.tensor([1]), number)


def test_a_swapped_module_compiles_to_one_graph_and_reads_one_version_a_call(store: Store) -> None:
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Scorer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.item = nn.Embedding(4, 8)

        def forward(self, keys: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.item(keys), self.item(keys)]).sum(1)

    net = swap_embeddings(Scorer(), store.model("ctr"), features={"item": "item_id"})
    views: list[Any] = []
    scope = net.item.scope
    read = net.item.read
    net.item.read = lambda keys: (views.append(scope.of(None)), read(keys))[1]
    compiled = torch.compile(net, backend=count)
    keys = torch.tensor([1, 2, 3])
    with torch.inference_mode():
        torch.testing.assert_close(compiled(keys), net(keys))
    assert len(graphs) == 1
    assert len(views) == 4
    assert views[0] is not None
    assert views[0] is views[1]


@pytest.mark.parametrize("on_gpu", [False, pytest.param(True, marks=ON_GPU)])
def test_keys_on_a_gpu_are_answered_by_its_tier(on_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the stand-in's memory is the CPU's, so that tensors of the CPU are taken for ones on it."""
    if on_gpu and not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    if not on_gpu:
        device = ShimDevice(number=0)
        monkeypatch.setattr(gpu, "find_backend", lambda: (device, None))
        monkeypatch.setattr(modules, "_gpu_of", lambda source, keys: 0 if source.answers_on_gpu(0) else None)
        monkeypatch.setattr(modules, "_on", lambda number: {"device": f"gpu:{number}"})
    with open_store(tmp_path, device_budget="64MiB") as store:
        ctr = store.model("ctr")
        assert ctr.answers_on_gpu(0)
        assert not ctr.answers_on_gpu(1)
        for _ in range(3):
            for options, arguments in cases():
                rows, bags = Net(ctr, **options).eval()(*(one.cuda() if on_gpu else one for one in arguments))
                item, keys, *more = arguments
                wanted = torch.from_numpy(ctr.lookup("item_id", item.reshape(-1).numpy())) * 2 + 1
                torch.testing.assert_close(rows.cpu(), wanted.sum())
                assert rows.is_cuda == bags.is_cuda == on_gpu
                offsets = more[0] if more else torch.arange(len(keys)) * keys.shape[1]
                starts = offsets[:-1] if options else offsets
                weights = more[1].numpy() if len(more) > 1 else None
                pooled = ctr.lookup_bags("clicked", keys.reshape(-1).numpy(), starts.numpy(), weights=weights, combiner="sum")  # fmt: skip
                torch.testing.assert_close(bags.cpu(), torch.from_numpy(pooled) - 1)
        assert store.status()["models"]["ctr"]["tables"]["item"]["lookup_keys"]["device"] > 0
        with monkeypatch.context() as spied:  # nothing is copied to the CPU, not even the end of the offsets
            for where in gpu, device_lookup, table_view:
                spied.setattr(where, "from_device", lambda *_: pytest.fail("copied"))
            bag = EmbeddingBag(ctr, "item_id", mode="sum", include_last_offset=True).eval()
            given = [torch.tensor([5, 3, 9, 2, 7]), torch.tensor([0, 2, 2, 4]), torch.linspace(0, 1, 5)]
            for dtype in torch.int64, torch.int32:
                keys, offsets = (one.to(dtype).to("cuda" if on_gpu else "cpu") for one in given[:2])
                pooled = bag(keys, offsets, given[2].to(keys.device)).cpu()
                wanted = ctr.lookup_bags(
                    "item_id", [5, 3, 9, 2], [0, 2, 2], weights=given[2][:4].numpy(), combiner="sum"
                )
                torch.testing.assert_close(pooled, torch.from_numpy(wanted))
        if on_gpu:
            pooled = bag(given[0].cuda(), given[1], given[2]).cpu()  # offsets and weights on the CPU
            torch.testing.assert_close(pooled, torch.from_numpy(wanted))
        else:
            meta = torch.empty(2, dtype=torch.int64, device="meta")
            assert modules._there(meta, given[0]) is meta  # no address of another device is taken for one on this
        if not on_gpu:
            assert {"look_up", "pool"} <= device.launched.keys()
