"""Tables that FBGEMM trains, served, and followed by deltas of the rows that its sparse optimizer has changed.

python examples/fbgemm_with_deltas.py      # needs torch and fbgemm-gpu-cpu; writes `data/` and others
"""

from typing import Any

import numpy as np
import torch
from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode

import tierstore

TABLES = {"user": 1000, "item": 5000}
DIM = 16


def make_tables() -> Any:
    specs = [(rows, DIM, EmbeddingLocation.HOST, training.ComputeDevice.CPU) for rows in TABLES.values()]
    tables = training.SplitTableBatchedEmbeddingBagsCodegen(
        specs, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.1, pooling_mode=PoolingMode.SUM
    )
    tables.init_embedding_weights_uniform(-0.1, 0.1)
    return tables


def batch(bags: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By table the keys of its bags, of 0 to 4 each, and where each begins."""
    made = {}
    for name, rows in TABLES.items():
        lengths = torch.randint(0, 5, (bags,))
        made[name] = torch.randint(0, rows, (int(lengths.sum()),)), lengths.cumsum(0) - lengths
    return made


def pooled(tables: Any, bags: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """What FBGEMM makes of all bags, [bags, all dims]: it takes the keys of one table after those of the other."""
    starts = np.cumsum([0, *(len(keys) for keys, _ in bags.values())])
    keys = torch.cat([keys for keys, _ in bags.values()])
    offsets = [offsets + start for (_, offsets), start in zip(bags.values(), starts.tolist(), strict=False)]
    made: torch.Tensor = tables(keys, torch.cat([*offsets, torch.tensor([len(keys)])]))
    return made


def check(store: tierstore.Store, tables: Any) -> None:
    """Every row of every table, and pooled bags."""
    ctr, bags = store.model("ctr"), batch(200)
    for name, rows in zip(TABLES, tables.split_embedding_weights(), strict=True):
        np.testing.assert_array_equal(ctr.lookup(name, np.arange(len(rows))), rows.detach().numpy())
    served = [ctr.lookup_bags(name, keys.numpy(), offsets.numpy()) for name, (keys, offsets) in bags.items()]
    np.testing.assert_allclose(np.concatenate(served, axis=1), pooled(tables, bags).detach().numpy(), atol=1e-6)


def main() -> None:
    torch.manual_seed(0)
    tables = make_tables()
    weights = dict(zip(TABLES, tables.split_embedding_weights(), strict=True))
    with tierstore.SnapshotWriter("snapshots/1", model="ctr", version=1) as snapshot:
        for name, rows in weights.items():
            snapshot.table(name, dim=DIM).write(np.arange(len(rows)), rows.detach())
            snapshot.feature(name, table=name, combiner="sum")
    with tierstore.open("data", host_budget="64MiB") as store:
        store.load_snapshot("snapshots/1")
        for seq in (1, 2, 3):
            bags = batch(64)
            pooled(tables, bags).square().sum().backward()  # the optimizer's step is in it
            with tierstore.DeltaWriter(f"{seq}.arrow", model="ctr", seq=seq) as delta:
                for name, (keys, _) in bags.items():
                    delta.upsert(name, keys.unique(), weights[name].detach()[keys.unique()])
            store.apply_delta(f"{seq}.arrow")
            check(store, tables)
    print("served rows and bags are FBGEMM's after each delta")


if __name__ == "__main__":
    main()
