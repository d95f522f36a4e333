"""Tables whose rows are not as they lie in memory: written by hand as they lie they are refused at load, with the
difference named; written as the module reads them they are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make trainers")
pytest.importorskip("onnxruntime", reason="needs the extra `dense`")

import torch
from torch import nn

import tierstore
from tests.engine.quick_build import in_process
from tests.predict import onnx_models as om
from tierstore.errors import SnapshotError

ROWS, DIM = 40, 6
IDS = np.arange(ROWS)


class Written(NamedTuple):
    """Rows of `keys` as they lie, as they should be written, and as the trained module reads them."""

    wrong: Any
    right: Any
    read: Any
    keys: Any = IDS


def read_by(table: Any, ids: Any = IDS) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        found: np.ndarray[Any, Any] = table(torch.from_numpy(np.asarray(ids))).float().numpy().copy()
    return found


def weight_of(table: Any) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = table.weight.detach().numpy().copy()
    return found


class Scaled(nn.Embedding):
    """As transformers scale theirs."""

    def forward(self, ids: Any) -> Any:
        return super().forward(ids) * DIM**0.5


def subclassed() -> Written:
    table = Scaled(ROWS, DIM)
    return Written(weight_of(table), read_by(table), read_by(table))


def hooked() -> Written:
    table = nn.Embedding(ROWS, DIM)
    table.register_forward_hook(lambda _, given, rows: nn.functional.normalize(rows, dim=-1))
    return Written(weight_of(table), read_by(table), read_by(table))


def max_norm() -> Written:
    table = nn.Embedding(ROWS, DIM, max_norm=0.5)
    before = weight_of(table)  # looking rows up shortens those that are looked up, in the table itself
    return Written(before, read_by(table), read_by(table))


def parametrized() -> Written:
    table = nn.utils.parametrizations.weight_norm(nn.Embedding(ROWS, DIM))
    with torch.no_grad():
        table.parametrizations.weight.original0.mul_(3)
    return Written(table.parametrizations.weight.original1.detach().numpy(), read_by(table), read_by(table))


def padded() -> Written:
    """A bag that is read without its padding row."""
    table = nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=3)
    with torch.no_grad():
        table.weight[3] = 1.0
    read = read_by(table, IDS[:, None])
    return Written(weight_of(table), read, read)


def quantized() -> Written:
    """int8 rows of PyTorch's own dynamic quantization: codes, a scale and a zero point a row."""
    full = nn.Embedding(ROWS, DIM)
    full.qconfig = torch.ao.quantization.float_qparams_weight_only_qconfig
    table = torch.ao.nn.quantized.Embedding.from_float(full)
    return Written(table.weight().int_repr().numpy(), table.weight().dequantize().numpy(), read_by(table))


def managed() -> Written:
    """TorchRec's managed collisions: ids are given slots as they come."""
    pytest.importorskip("torchrec", reason="TorchRec is not installed: make trainers")
    from tests.torch.test_torchrec import Managed, jagged_of, mch, trained

    net = trained(Managed(mch()))
    module = net.rows._managed_collision_collection._managed_collision_modules["item"]
    ids, slots = module._mch_sorted_raw_ids.numpy().copy(), module._mch_remapped_ids_mapping.numpy().copy()
    known = ids != np.iinfo(np.int64).max
    rows = net.rows._embedding_module.embedding_bags["item"].weight.detach().numpy().copy()
    with torch.no_grad():
        read = net(jagged_of(*ids[known].tolist())).numpy().copy()
    return Written(rows[: known.sum()], rows[slots[known]], read, ids[known])


CASES: dict[str, Callable[[], Written]] = {
    "subclassed": subclassed, "hooked": hooked, "max_norm": max_norm, "parametrized": parametrized,
    "a padding row in bags": padded, "quantized codes": quantized, "managed collisions": managed,
}  # fmt: skip


def load(tmp_path: Path, rows: Any, case: Written) -> dict[str, Any]:
    """Load them with a ranker of one layer, whose own scores of what the module reads are expected."""
    dim = case.read.shape[1]
    torch.manual_seed(1)
    top = nn.Linear(dim, 1)
    with torch.no_grad():
        scores = top(torch.from_numpy(case.read)).numpy()
    graph = om.linear({"item_id": top.weight.detach().numpy()[0]}, float(top.bias[0]))
    with tierstore.SnapshotWriter(tmp_path / "s", model="ctr", version=1) as snapshot:
        snapshot.table("item", dim=dim).write(case.keys, np.asarray(rows).astype(np.float32))
        snapshot.feature("item_id", table="item")
        snapshot.dense(graph)
        snapshot.golden({"item_id": case.keys}, {"score": scores})
    with in_process(), tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(tmp_path / "s")
        found: dict[str, Any] = store.status()["models"]["ctr"]["versions"][0]["golden"]
        return found


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", CASES)
def test_rows_as_they_lie_in_memory_are_refused_and_the_difference_named(tmp_path: Path, name: str) -> None:
    case = CASES[name]()
    with pytest.raises(SnapshotError, match=r"golden example 0: output 'score': \d+ of \d+ differ: expected .*, got"):
        load(tmp_path, case.wrong, case)


@pytest.mark.parametrize("name", CASES)
def test_rows_as_the_module_reads_them_are_taken(tmp_path: Path, name: str) -> None:
    case = CASES[name]()
    assert load(tmp_path, case.right, case)["held"] == 1
