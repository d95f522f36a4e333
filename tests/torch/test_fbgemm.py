"""FBGEMM's tables on a CPU: every row and pooled bag is served as FBGEMM has it, of tables that train, and of quantized ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fbgemm_gpu", reason="FBGEMM is not installed: make trainers")

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)

import tierstore
from tierstore.kernels.codec import encode
from tierstore.types import StorageDtype

pytestmark = pytest.mark.thorough
SHAPES = {"user": (300, 8), "item": (500, 16)}
BAGS = 40
DTYPES = {
    SparseType.INT8: ("int8", "float32"),
    SparseType.INT4: ("int4", "float32"),
    SparseType.FP16: ("float16", "float32"),
}


def bags(seed: int) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], torch.Tensor, torch.Tensor]:
    """By table keys and offsets of bags of 0 to 5; and all of them as FBGEMM has them, keys and offsets with an end."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (len(SHAPES), BAGS), generator=rng)
    keys = [
        torch.randint(0, rows, (int(of.sum()),), generator=rng)
        for (rows, _), of in zip(SHAPES.values(), lengths, strict=True)
    ]
    own = {name: (of.numpy(), (n.cumsum(0) - n).numpy()) for name, of, n in zip(SHAPES, keys, lengths, strict=True)}
    return own, torch.cat(keys), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.reshape(-1).cumsum(0)])


def write(where: Path, tables: dict[str, torch.Tensor], dtype: str = "float32") -> Path:
    with tierstore.SnapshotWriter(where, model="ctr", version=1) as snapshot:
        for name, rows in tables.items():
            snapshot.table(name, dim=rows.shape[1], dtype=dtype).write(np.arange(len(rows)), rows.detach())
            snapshot.feature(name, table=name, combiner="sum")
    return where


def check(store: tierstore.Store, tables: dict[str, torch.Tensor], pooled: Any) -> None:
    """Rows to the bit; bags too, but for the order in which numbers are added. `pooled(keys, offsets)` is FBGEMM's."""
    model, (own, keys, offsets) = store.model("ctr"), bags(99)
    for name, rows in tables.items():
        np.testing.assert_array_equal(model.lookup(name, np.arange(len(rows))), rows.detach().numpy())
    served = np.concatenate([model.lookup_bags(name, *of) for name, of in own.items()], axis=1)
    np.testing.assert_allclose(served, pooled(keys, offsets).detach().numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer", [EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD]
)
def test_tables_that_fbgemm_trains_are_followed_by_what_was_looked_up(tmp_path: Path, optimizer: Any) -> None:
    specs = [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in SHAPES.values()]
    of = SplitTableBatchedEmbeddingBagsCodegen(specs, optimizer=optimizer, learning_rate=0.1)
    of.init_embedding_weights_uniform(-0.1, 0.1)
    tables = dict(zip(SHAPES, of.split_embedding_weights(), strict=True))
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(write(tmp_path / "s", tables))
        check(store, tables, of)
        for seq in (1, 2, 3):
            own, keys, offsets = bags(seq)
            of(keys, offsets).square().sum().backward()
            with tierstore.DeltaWriter(tmp_path / f"{seq}.arrow", model="ctr", seq=seq) as delta:
                for name, (its, _) in own.items():
                    rows = np.unique(its)
                    delta.upsert(name, rows, tables[name].detach()[rows])
            store.apply_delta(tmp_path / f"{seq}.arrow")
            check(store, tables, of)


def test_dense_tables(tmp_path: Path) -> None:
    of = DenseTableBatchedEmbeddingBagsCodegen([*SHAPES.values()], use_cpu=True)
    of.init_embedding_weights_uniform(-0.1, 0.1)
    tables = dict(zip(SHAPES, of.split_embedding_weights(), strict=True))
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(write(tmp_path / "s", tables))
        check(store, tables, of)


@pytest.mark.parametrize(("kind", "dtype"), [(kind, dtype) for kind, dtypes in DTYPES.items() for dtype in dtypes])
def test_quantized_tables(tmp_path: Path, kind: Any, dtype: str) -> None:
    specs = [(name, *shape, kind, EmbeddingLocation.HOST) for name, shape in SHAPES.items()]
    of = IntNBitTableBatchedEmbeddingBagsCodegen(
        specs, device="cpu", pooling_mode=PoolingMode.SUM, output_dtype=SparseType.FP32
    )
    of.initialize_weights()
    of.assign_embedding_weights([quantized(torch.randn(*shape), kind) for shape in SHAPES.values()])
    tables = {
        name: rows_of(*parts, kind)
        for name, parts in zip(SHAPES, of.split_embedding_weights_with_scale_bias(2), strict=True)
    }
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(write(tmp_path / "s", tables, dtype))
        check(store, tables, lambda keys, offsets: of(keys.int(), offsets.int()))


@pytest.mark.parametrize("dim", [4, 16, 64, 132])
@pytest.mark.parametrize("scale", [1e-8, 1e-5, 0.01, 1.0, 1e4])
@pytest.mark.parametrize("offset", [0.0, 1e-4, 100.0, -3000.0])
def test_rows_of_four_bits_are_fbgemms_to_the_bit(dim: int, scale: float, offset: float) -> None:
    rows = (torch.randn(500, dim) * scale + offset).clip(-65000, 65000)
    codes, head = quantized(rows, SparseType.INT4)
    np.testing.assert_array_equal(encode(rows.numpy(), StorageDtype.INT4), torch.cat([head, codes], 1).numpy())


def quantized(rows: torch.Tensor, kind: Any) -> Any:
    """The bytes of rows, and those of their scales, as FBGEMM's own operator makes them."""
    if kind is SparseType.FP16:
        return rows.half().view(torch.uint8), None
    fused = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, kind.bit_rate())
    return fused[:, :-4].contiguous(), fused[:, -4:].contiguous()


def rows_of(codes: torch.Tensor, scale: Any, bias: Any, kind: Any) -> torch.Tensor:
    if kind is SparseType.FP16:
        return codes.view(torch.float16).float()
    if kind is SparseType.INT4:  # two numbers a byte
        codes = torch.stack([codes & 15, codes >> 4], 2).reshape(len(codes), -1)
    return codes.float() * scale.float() + bias.float()
