"""Tables that do more than look rows up: what is served is what the module scores with, or it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make trainers")
pytest.importorskip("onnxscript", reason="onnxscript is not installed: make trainers")
pytest.importorskip("onnxruntime", reason="needs the extra `dense`")

import torch
from torch import nn

import tierstore
from tierstore.errors import InvalidInput, SnapshotError
from tierstore.formats.delta.reader import read_delta
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.torch import TouchedRows, export_dense, swap_embeddings, write_delta, write_snapshot

ROWS, DIM = 100, 4
INPUTS = {"item_id": torch.tensor([1, 2, 3, 4])}


class Net(nn.Module):
    def __init__(self, item: Any = None) -> None:
        super().__init__()
        self.item = item or nn.Embedding(ROWS, DIM)
        self.top = nn.Linear(DIM, 1)

    def forward(self, item_id: Any) -> Any:
        return self.top(self.item(item_id)).squeeze(1)


def scores(net: nn.Module, inputs: dict[str, Any]) -> Any:
    with torch.no_grad():
        return net.eval()(**inputs).numpy(force=True)


def served(tmp_path: Path, net: nn.Module, inputs: dict[str, Any], request: dict[str, Any], **options: Any) -> Any:
    """The scores of a store that a module was written for with one example, of another."""
    write_snapshot(tmp_path / "s", net, inputs, model="m", version=1, **options)
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(tmp_path / "s")
        return store.model("m").predict(request)


# --- a forward of its own


class Scaled(nn.Embedding):
    def forward(self, input: Any) -> Any:
        return super().forward(input) * 0.5


class Clamped(nn.Embedding):
    def forward(self, input: Any) -> Any:
        return super().forward(input.clamp(0, ROWS - 1))


class UnknownToZero(nn.Embedding):
    def forward(self, input: Any) -> Any:
        return super().forward(torch.where(input < ROWS, input, 0))


class ScaledBag(nn.EmbeddingBag):
    def forward(self, input: Any, offsets: Any = None, per_sample_weights: Any = None) -> Any:
        return super().forward(input, offsets, per_sample_weights) * 0.5


class LowRank(nn.Embedding):
    """With an addition of low rank beside the weight."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.a, self.b = nn.Parameter(torch.randn(ROWS, 2)), nn.Parameter(torch.randn(2, DIM))

    def forward(self, input: Any) -> Any:
        return super().forward(input) + self.a[input] @ self.b


def by_instance() -> nn.Embedding:
    table = nn.Embedding(ROWS, DIM)
    plain = table.forward
    table.forward = lambda input: plain(input) * 2  # type: ignore[method-assign]
    return table


OWN_FORWARD: dict[str, Callable[[], Any]] = {
    "scaled": lambda: Scaled(ROWS, DIM),
    "clamped": lambda: Clamped(ROWS, DIM),
    "unknown to zero": lambda: UnknownToZero(ROWS, DIM),
    "bag": lambda: ScaledBag(ROWS, DIM, mode="sum"),
    "low rank": lambda: LowRank(ROWS, DIM),
    "of one instance": by_instance,
}


@pytest.mark.parametrize("make", OWN_FORWARD.values(), ids=OWN_FORWARD)
def test_a_table_with_a_forward_of_its_own_is_refused_at_each_way_in(
    tmp_path: Path, make: Callable[[], Any], store: Any
) -> None:
    net = Net(make())
    inputs = INPUTS if isinstance(net.item, nn.Embedding) else {"item_id": torch.arange(8).reshape(4, 2)}
    reason = "table 'item' is a .*, whose forward is not that of nn.Embedding"
    for dense in (True, False):
        with pytest.raises(InvalidInput, match=reason):
            write_snapshot(tmp_path / "s", net, inputs, model="m", version=1, dense=dense)
    with pytest.raises(InvalidInput, match=reason):
        export_dense(net, inputs)
    with pytest.raises(InvalidInput, match=reason):
        TouchedRows(net)
    with pytest.raises(InvalidInput, match=reason):
        swap_embeddings(net, store.model("m"))
    assert isinstance(net.item, (nn.Embedding, nn.EmbeddingBag)), "nothing is replaced"
    assert not (tmp_path / "s").exists()


def test_a_subclass_that_only_fills_its_weight_is_a_plain_table(tmp_path: Path) -> None:
    class Normal(nn.Embedding):
        def reset_parameters(self) -> None:
            nn.init.normal_(self.weight, std=0.01)

    net = Net(Normal(ROWS, DIM))
    other = {"item_id": torch.tensor([70, 99])}
    np.testing.assert_allclose(served(tmp_path, net, INPUTS, {"item_id": [70, 99]}), scores(net, other), atol=1e-6)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    write_snapshot(tmp_path / "plain", Net(), INPUTS, model="m", version=1, dense=False)
    with tierstore.open(tmp_path / "plain-data", host_budget="4MiB", load_workers=1) as opened:
        opened.load_snapshot(tmp_path / "plain")
        yield opened


# --- hooks


def test_a_hook_that_changes_rows_is_refused_and_one_that_looks_on_is_not(tmp_path: Path, store: Any) -> None:
    seen: list[int] = []
    net = Net()
    net.item.register_forward_hook(lambda _, given, rows: seen.append(len(rows)))
    net.item.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    TouchedRows(net)
    write_snapshot(tmp_path / "1", net, INPUTS, model="m", version=1)
    assert seen
    with pytest.raises(InvalidInput, match="table 'item' has a forward hook, which would not be called any more"):
        swap_embeddings(net, store.model("m"))
    hook = net.item.register_forward_hook(lambda _, given, rows: rows * 0.5)
    for dense in (True, False):
        with pytest.raises(InvalidInput, match="table 'item' answers feature 'item_id' with something else"):
            write_snapshot(tmp_path / "2", net, INPUTS, model="m", version=1, dense=dense)
    hook.remove()
    # of a key that the example does not name
    hook = net.item.register_forward_hook(lambda _, given, rows: rows.masked_fill((given[0] == 0)[:, None], 1.0))
    with pytest.raises(InvalidInput, match="table 'item' answers feature 'item_id' with something else"):
        write_snapshot(tmp_path / "2", net, INPUTS, model="m", version=1, dense=False)
    hook.remove()
    net.item.register_forward_pre_hook(lambda _, given: (given[0] % 7,))
    with pytest.raises(InvalidInput, match="table 'item' is looked up with a value that is no argument of forward"):
        write_snapshot(tmp_path / "2", net, INPUTS, model="m", version=1)
    assert not (tmp_path / "2").exists()


def test_tables_with_hooks_of_touched_rows_can_be_swapped(store: Any) -> None:
    net = Net()
    TouchedRows(net)
    assert not isinstance(swap_embeddings(net, store.model("m")).item, nn.Embedding)


# --- the check after an export has power


class OddKeys(Net):
    """Takes odd keys above 50 for unknown, by what is no part of a table."""

    def forward(self, item_id: Any) -> Any:
        odd = self.odd(item_id) if isinstance(item_id, torch.Tensor) and not item_id.is_floating_point() else 0
        return super().forward(item_id) + odd

    def odd(self, item_id: Any) -> Any:
        return ((item_id > 50) & (item_id % 2 == 1)).float()


class Tiny(Net):
    """Scores that differ in the sixth place, half of them wrong."""

    def forward(self, item_id: Any) -> Any:
        scores = super().forward(item_id) * 1e-5
        return scores if item_id.is_floating_point() else scores * 0.5


@pytest.mark.parametrize("net", [OddKeys(), Tiny()], ids=["keys that the example does not name", "small scores"])
def test_scores_are_compared_for_keys_of_the_whole_table_and_by_how_they_differ(tmp_path: Path, net: Any) -> None:
    with pytest.raises(SnapshotError, match=r"output 0 differs by .* or for keys drawn from the tables"):
        write_snapshot(tmp_path / "s", net, INPUTS, model="m", version=1)


# --- rows that are not as they lie


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_rows_with_a_max_norm_are_written_as_they_are_read(tmp_path: Path, norm_type: float) -> None:
    torch.manual_seed(1)
    net = Net(nn.Embedding(ROWS, DIM, max_norm=0.5, norm_type=norm_type))
    every = {"item_id": torch.arange(ROWS)}
    got = served(tmp_path, net, INPUTS, {"item_id": np.arange(ROWS)})
    stored = net.item.weight.detach().norm(dim=1)
    assert (stored > 0.5).any(), "rows that were not looked up are longer in the module"
    np.testing.assert_allclose(got, scores(net, every), atol=1e-6)


@pytest.mark.parametrize("hold_back", [None, 0.0])
def test_a_delta_has_rows_with_a_max_norm_as_they_are_read(tmp_path: Path, hold_back: Any) -> None:
    net = Net(nn.Embedding(ROWS, DIM, max_norm=0.5))
    touched, by = TouchedRows(net, hold_back=hold_back), torch.optim.SGD(net.parameters(), 10.0)
    net(torch.tensor([7, 8])).sum().backward()
    by.step()
    write_delta(tmp_path / "1.arrow", touched, model="m", seq=1)
    table = read_delta(tmp_path / "1.arrow").tables["item"]
    with torch.no_grad():
        read = net.item(torch.from_numpy(np.array(table.keys))).numpy()
    assert {7, 8} <= set(table.keys.tolist())
    np.testing.assert_allclose(table.vectors, read, rtol=1e-6)


def test_swapping_a_table_with_a_max_norm_is_refused_with_the_way_out(store: Any) -> None:
    net = Net(nn.Embedding(ROWS, DIM, max_norm=0.5))
    with pytest.raises(InvalidInput, match="write_snapshot writes them shortened, and `max_norm = None`"):
        swap_embeddings(net, store.model("m"))


def test_a_weight_that_is_computed_is_written_and_has_no_deltas(tmp_path: Path) -> None:
    for name, make in {
        "parametrized": nn.utils.parametrizations.weight_norm,
        "by a hook": nn.utils.weight_norm,
    }.items():
        net = Net(make(nn.Embedding(ROWS, DIM)))
        with torch.no_grad():
            for one in net.item.parameters():
                one.mul_(3)  # what a step would do: the weight follows at the next look-up
        every = {"item_id": torch.arange(ROWS)}
        got = served(tmp_path / name, net, INPUTS, {"item_id": np.arange(ROWS)})
        np.testing.assert_allclose(got, scores(net, every), rtol=1e-4, atol=1e-5)
        with pytest.raises(InvalidInput, match="table 'item': its weight is computed from other parameters"):
            TouchedRows(net)


def test_a_padding_row_that_is_not_zeros_is_served_as_the_module_reads_it(tmp_path: Path) -> None:
    """`nn.Embedding` only leaves its gradient out; `nn.EmbeddingBag` leaves the row out."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.item = nn.Embedding.from_pretrained(torch.rand(ROWS, DIM) + 1, padding_idx=5)
            self.bag = nn.EmbeddingBag.from_pretrained(torch.rand(ROWS, DIM) + 1, padding_idx=5, mode="mean")

        def forward(self, item_id: Any, bag: Any) -> Any:
            return self.item(item_id).sum(1) + self.bag(bag).sum(1)

    net = Both()
    inputs = {"item_id": torch.tensor([1, 2]), "bag": torch.tensor([[1, 2], [3, 4]])}
    other = {"item_id": torch.tensor([5, 6, 7]), "bag": torch.tensor([[5, 5], [5, 1], [1, 2]])}
    got = served(tmp_path, net, inputs, {name: value.numpy() for name, value in other.items()})
    np.testing.assert_allclose(got, scores(net, other), rtol=1e-5)
    assert [one.padding_key for one in open_snapshot(tmp_path / "s").manifest.features] == [None, 5]
    with tierstore.open(tmp_path / "data") as store:
        wanted = scores(net, other)
        np.testing.assert_allclose(scores(swap_embeddings(net, store.model("m")), other), wanted, rtol=1e-5)


# --- bags


class Bags(nn.Module):
    def __init__(self, how: Any = None, **options: Any) -> None:
        super().__init__()
        self.bag, self.how = nn.EmbeddingBag(ROWS, DIM, mode="sum", **options), how

    def forward(self, keys: Any, weights: Any, at: Any) -> Any:
        if self.how is not None:
            return self.how(self.bag, keys, weights, at).sum(1)
        return self.bag(input=keys, per_sample_weights=weights, offsets=at).sum(1)


def test_an_example_with_bags_of_any_form_is_a_request_that_succeeds(tmp_path: Path) -> None:
    keys, weights = torch.arange(6) * 3, torch.rand(6)
    flat = {"keys": keys, "weights": weights, "at": torch.tensor([0, 2, 2])}
    ended = flat | {"at": torch.tensor([0, 2, 2, 6])}
    matrix = {"keys": keys.reshape(3, 2), "weights": weights.reshape(3, 2), "at": None}
    request = {"keys": (keys.numpy(), np.array([0, 2, 2]), weights.numpy())}
    for number, (inputs, options, to_ask) in enumerate(
        [
            (flat, {}, request),
            (ended, {"include_last_offset": True}, request),
            (matrix, {}, {"keys": (keys.numpy(), np.array([0, 2, 4]), weights.numpy())}),
        ]
    ):
        net = Bags(**options)
        got = served(tmp_path / str(number), net, inputs, to_ask)
        np.testing.assert_allclose(got, scores(net, inputs), rtol=1e-5)


def test_offsets_and_weights_that_forward_computes_are_refused(tmp_path: Path) -> None:
    inputs = {"keys": torch.arange(6), "weights": torch.rand(6), "at": torch.tensor([0, 2, 4])}
    for part, how in {
        "per_sample_weights": lambda bag, keys, weights, at: bag(keys, at, weights * 2),
        "offsets": lambda bag, keys, weights, at: bag(keys, torch.tensor([0, 2, 4])),
    }.items():
        with pytest.raises(InvalidInput, match=f"table 'bag' is looked up with {part} that forward computes"):
            write_snapshot(tmp_path / "s", Bags(how), inputs, model="m", version=1, dense=False)


# --- one weight of several parts


class Tied(nn.Module):
    """Two tables of one weight, and one table under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM)
        self.clicked = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.clicked.weight = self.item.weight
        self.again = self.item
        self.top = nn.Linear(DIM, 1)

    def forward(self, item_id: Any, clicked: Any, other_id: Any) -> Any:
        rows = self.item(item_id) + self.clicked(clicked) + self.again(other_id)
        return self.top(rows).squeeze(1)


@pytest.mark.parametrize("hold_back", [None, 0.0])
def test_tables_of_one_weight_follow_its_training_together(tmp_path: Path, hold_back: Any) -> None:
    net = Tied()
    inputs = {"item_id": torch.arange(3), "clicked": torch.arange(6).reshape(3, 2), "other_id": torch.arange(3)}
    touched, by = TouchedRows(net, hold_back=hold_back), torch.optim.SGD(net.parameters(), 1.0)
    write_snapshot(tmp_path / "s", net, inputs, model="m", version=1, touched=touched)
    used = {"item_id": torch.tensor([50]), "clicked": torch.tensor([[60, 61]]), "other_id": torch.tensor([70])}
    net.train()(**used).sum().backward()
    by.step()
    dense = export_dense(net, inputs)
    assert write_delta(tmp_path / "1.arrow", touched, model="m", seq=1, dense=dense) == 8
    other = {"item_id": torch.tensor([60, 61]), "clicked": torch.tensor([[50, 70]] * 2), "other_id": torch.tensor([50, 1])}  # fmt: skip
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(tmp_path / "s")
        store.apply_delta(tmp_path / "1.arrow")
        model = store.model("m")
        got = model.predict({name: value.numpy() for name, value in other.items()})
        wanted = scores(net, other)
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
        swap_embeddings(net, model)
        np.testing.assert_allclose(scores(net, other), wanted, rtol=1e-5)


class Softmax(nn.Module):
    """A head over all items that shares the weight of their table: as a part, or as forward takes it."""

    def __init__(self, *, part: bool, sparse: bool = False) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM, sparse=sparse)
        self.head = nn.Linear(DIM, ROWS, bias=False) if part else None
        if self.head is not None:
            self.head.weight = self.item.weight

    def forward(self, item_id: Any) -> Any:
        rows = self.item(item_id)
        return rows @ self.item.weight.T if self.head is None else self.head(rows)


@pytest.mark.parametrize("part", [True, False])
def test_a_head_that_shares_the_weight_of_a_table_leaves_no_row_behind(tmp_path: Path, part: bool) -> None:
    net = Softmax(part=part)
    touched = TouchedRows(net)
    by = torch.optim.SGD(net.parameters(), 1.0)
    before = net.item.weight.detach().clone()
    nn.functional.cross_entropy(net(torch.tensor([1, 2])), torch.tensor([5, 6])).backward()
    by.step()
    changed = (net.item.weight.detach() != before).any(1).nonzero().reshape(-1)
    assert len(changed) > ROWS / 2
    assert set(changed.tolist()) <= set(touched.rows("item").tolist())
    dense = export_dense(net, INPUTS)
    assert write_delta(tmp_path / "1.arrow", touched, model="m", seq=1, dense=dense) >= len(changed)
    touched.close()
    net(torch.tensor([1])).sum().backward()
    by.step()
    assert len(touched.rows("item")) == 0


def test_rows_are_not_missed_that_a_compiled_module_has_looked_up() -> None:
    """Hooks that are registered once it was compiled are not called by it."""
    for sparse in (False, True):
        net = Net(nn.Embedding(ROWS, DIM, sparse=sparse))
        compiled = torch.compile(net, backend="eager")
        compiled(torch.tensor([1, 2]))
        touched, by = TouchedRows(compiled), torch.optim.SGD(net.parameters(), 1.0)
        compiled(torch.tensor([7, 9])).sum().backward()
        by.step()
        assert {7, 9} <= set(touched.rows("item").tolist())
        touched.clear()
        assert len(touched.rows("item")) == 0


# --- modules in other forms


def test_parts_are_afterwards_in_the_mode_that_they_were_in(tmp_path: Path) -> None:
    class Frozen(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(DIM), nn.Dropout(0.5)

        def forward(self, item_id: Any) -> Any:
            return self.top(self.drop(self.norm(self.item(item_id)))).squeeze(1)

    net = Frozen().train()
    net.norm.eval()
    modes = {name: part.training for name, part in net.named_modules()}
    assert not modes["norm"]
    assert modes["drop"]
    export_dense(net, INPUTS)
    write_snapshot(tmp_path / "s", net, INPUTS, model="m", version=1)
    assert {name: part.training for name, part in net.named_modules()} == modes
    net.eval()
    net.drop.train()
    with pytest.raises(TypeError):
        export_dense(net, INPUTS | {"other": torch.ones(4)})
    assert net.drop.training
    assert not net.training


@pytest.mark.parametrize("form", ["compiled", "compiled in place", "a part", "in data parallel", "traced by fx"])
def test_a_module_in_another_form_is_written_as_itself(tmp_path: Path, form: str) -> None:
    net = Net()
    wanted = scores(net, {"item_id": torch.tensor([70, 99])})
    given: Any = net
    if form == "compiled":
        given = torch.compile(net, backend="eager")
    elif form == "compiled in place":
        net.compile(backend="eager")
    elif form == "a part":
        net.top = torch.compile(net.top, backend="eager")  # type: ignore[assignment]
        net.item = torch.compile(net.item, backend="eager")  # type: ignore[assignment]
    elif form == "in data parallel":
        given = nn.DataParallel(net)
    else:
        given = torch.fx.symbolic_trace(net)
    given(**INPUTS)
    got = served(tmp_path, given, INPUTS, {"item_id": [70, 99]})
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert [table.name for table in open_snapshot(tmp_path / "s").manifest.tables] == ["item"]
    assert list(TouchedRows(given).tables) == ["item"]
    with tierstore.open(tmp_path / "data") as store:
        swap_embeddings(given, store.model("m"))
        np.testing.assert_allclose(scores(given, {"item_id": torch.tensor([70, 99])}), wanted, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_of_half_precision_are_served(tmp_path: Path, dtype: Any) -> None:
    class Half(Net):
        def forward(self, item_id: Any) -> Any:
            return self.top(self.item(item_id).float()).squeeze(1)

    net = Half(nn.Embedding(ROWS, DIM, dtype=dtype))
    got = served(tmp_path, net, INPUTS, {"item_id": [70, 99]})
    np.testing.assert_allclose(got, scores(net, {"item_id": torch.tensor([70, 99])}), rtol=1e-5)


def test_what_onnx_runtime_does_not_run_is_one_line_with_the_way_out(tmp_path: Path) -> None:
    net = Net().bfloat16()
    with pytest.raises(SnapshotError, match=r"(?s)^[^\n]*copy\.deepcopy\(module\)\.float\(\)[^\n]*$") as error:
        write_snapshot(tmp_path / "s", net, INPUTS, model="m", version=1)
    assert len(str(error.value)) < 800


def test_what_pytorch_does_not_export_is_one_line_with_the_way_out(tmp_path: Path) -> None:
    class TwoWays(Net):
        def forward(self, item_id: Any) -> Any:
            return super().forward(item_id) + self.top.weight[0][item_id % DIM]

    with pytest.raises(SnapshotError, match=r"(?s)^PyTorch cannot export what is not in tables: [^\n]*dense=False$") as error:  # fmt: skip
        write_snapshot(tmp_path / "s", TwoWays(), INPUTS, model="m", version=1)
    assert len(str(error.value)) < 900


def test_tables_that_are_not_whole_or_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"made by torch\.jit: give the module that it was made of"):
        TouchedRows(torch.jit.trace(Net(), torch.arange(2)))
    with pytest.raises(InvalidInput, match=r"item is a torch\.ao\.nn\.quantized.*before it was quantized"):
        TouchedRows(Net(torch.ao.nn.quantized.Embedding(ROWS, DIM)))
    with pytest.raises(
        InvalidInput, match=r"table 'item': expected a weight .* whole, got Parameter \[100, 4\] on meta"
    ):
        TouchedRows(Net(nn.Embedding(ROWS, DIM, device="meta")))


def test_a_dtensor_is_refused_with_the_way_out(tmp_path: Path) -> None:
    if not torch.distributed.is_available():
        pytest.skip("PyTorch has no torch.distributed")
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor import init_device_mesh as mesh_of

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        net = Net()
        net.item.weight = nn.Parameter(distribute_tensor(net.item.weight.detach(), mesh_of("cpu", (1,)), [Replicate()]))
        with pytest.raises(
            InvalidInput, match=r"expected a weight .* whole, got .*: load a state dict that was gathered"
        ):
            write_snapshot(tmp_path / "s", net, INPUTS, model="m", version=1)
        data_parallel = nn.parallel.DistributedDataParallel(Net())
        assert list(TouchedRows(data_parallel).tables) == ["item"]
    finally:
        torch.distributed.destroy_process_group()
