"""One rank of a sharded trainer that publishes each step, as `test_sharded.py` starts it. It compares by itself.

Arguments: rank, port of the rendezvous, URL of the service, directory, steps, and what goes wrong, such as `rank1-dies`.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import tierstore
from tierstore.errors import TierstoreError, Unreachable
from tierstore.torch import ShardedPublisher

BATCH, DIM, EVERY = 6, 8, 3
BAGS = {"users": 100, "goods": 101, "wide": 30, "small": 12}
WORDS = 40
FAILS = (2, 3, 5, 6)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        meta = torch.device("meta")
        bags = [EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[f"f_{name}"]) for name, rows in BAGS.items()]  # fmt: skip
        words = EmbeddingConfig(name="words", embedding_dim=DIM, num_embeddings=WORDS, feature_names=["f_words"])
        self.bags = EmbeddingBagCollection(tables=bags, device=meta)
        self.sequence = EmbeddingCollection(tables=[words], device=meta)
        self.over = torch.nn.Linear(DIM * len(BAGS), 1)

    def forward(self, bags: Any, words: Any) -> Any:
        out = self.over(self.bags(bags).values()).square().sum()
        return out if words is None else out + self.sequence(words)["f_words"].values().square().sum()


def make_model() -> Any:
    net = Net()
    apply_optimizer_in_backward(torch.optim.SGD, [*net.bags.parameters(), *net.sequence.parameters()], {"lr": 0.05})
    sharders: list[Any] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    where = {"local_size": 2, "world_size": 2, "device_type": "cpu"}
    how = {
        "users": table_wise(rank=1, compute_kernel="fused"),
        "goods": row_wise(compute_kernel="fused"),
        "wide": column_wise(ranks=[0, 1], compute_kernel="fused"),
        "small": data_parallel(),
    }
    words = {"words": row_wise(compute_kernel="fused")}
    plan = {
        "bags": construct_module_sharding_plan(net.bags, how, sharder=sharders[0], **where),
        "sequence": construct_module_sharding_plan(net.sequence, words, sharder=sharders[1], **where),
    }
    model = DistributedModelParallel(net, device=torch.device("cpu"), plan=ShardingPlan(plan), sharders=sharders)
    model.init_torchrec_delta_tracker(DeltaTrackerConfig())
    return model


def batch(seed: int, step: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    values = torch.cat([torch.randint(0, rows, (BATCH,)) for rows in BAGS.values()])
    lengths = torch.ones(BATCH * len(BAGS), dtype=torch.int32)
    bags = KeyedJaggedTensor.from_lengths_sync(keys=[f"f_{name}" for name in BAGS], values=values, lengths=lengths)
    if step % 2:  # a table that is quiet now and then
        return bags, None
    words = torch.randint(0, WORDS, (BATCH,))
    return bags, KeyedJaggedTensor.from_lengths_sync(keys=["f_words"], values=words, lengths=torch.ones(BATCH, dtype=torch.int32))  # fmt: skip


def tables_of(model: Any, rank: int) -> dict[str, np.ndarray]:
    """All rows of all tables, on rank 0: gathered by PyTorch itself."""
    found = {}
    for path, weight in model.state_dict().items():
        name = path.removesuffix(".weight").rpartition(".")[2]
        if name not in (*BAGS, "words"):
            continue
        if isinstance(weight, ShardedTensor):
            whole = torch.empty(tuple(weight.size())) if rank == 0 else None
            weight.gather(0, whole)
        else:
            whole = weight.detach().clone()
        if rank == 0:
            found[name] = whole.numpy()
    return found


def local(model: Any) -> dict[str, Any]:
    """What a checkpoint of this rank has: its own shards, and what every rank has."""
    state = model.state_dict()
    return {
        path: [shard.tensor for shard in of.local_shards()] if hasattr(of, "local_shards") else [of]
        for path, of in state.items()
    }


class Faulty:
    """A client that fails as the scene says, for the delta of one step."""

    def __init__(self, client: tierstore.Client, fault: str) -> None:
        self._client, self.fault, self.step = client, fault, 0
        self.status = client.status

    def apply_delta(self, content: bytes, **options: Any) -> Any:
        if self.fault == "unreachable" and self.step in (2, 3):
            raise Unreachable("the service is away")
        if self.fault == "rank0-dies-before" and self.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "unreachable" and self.step == 6:  # another writer has been faster
            sink = io.BytesIO()
            last = self._client.status("ctr")["models"]["ctr"]["log"]["last"]
            with tierstore.DeltaWriter(sink, model="ctr", seq=int(last or 0) + 1) as delta:
                delta.delete("users", np.array([1 << 40]))
            self._client.apply_delta(sink.getvalue())
        result = self._client.apply_delta(content, **options)
        if self.fault == "unreachable" and self.step == 5:
            raise Unreachable("its answer is lost")
        if self.fault == "rank0-dies-after" and self.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def main() -> None:
    rank, port, url, directory, steps, fault = int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]), sys.argv[6]  # fmt: skip
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = make_model()
    client = tierstore.Client(url)
    target = Faulty(client, fault) if rank == 0 else None
    publisher = ShardedPublisher(model, "ctr", target, journal=directory / "journal")

    def save(step: int) -> None:
        state = publisher.state_dict()
        torch.save({"step": step, "model": local(model), "publisher": state}, directory / f"{step}-{rank}.pt")
        dist.barrier()
        if rank == 0:
            (directory / "latest.tmp").write_text(str(step))
            (directory / "latest.tmp").rename(directory / "latest")
        publisher.saved(state)

    def compare(step: int) -> None:
        tables = tables_of(model, rank)
        for name, expected in tables.items():
            served = client.lookup("ctr", name, np.arange(len(expected)))
            unlike = np.flatnonzero((served.view(np.int32) != expected.view(np.int32)).any(axis=1))
            assert not len(unlike), f"step {step}, table {name}: rows {unlike.tolist()} differ"

    if (latest := directory / "latest").exists():
        saved = torch.load(directory / f"{latest.read_text()}-{rank}.pt")
        with torch.no_grad():
            for path, shards in local(model).items():
                for shard, of in zip(shards, saved["model"][path], strict=True):
                    shard.copy_(of)
        publisher.load_state_dict(saved["publisher"])
        first, seed = saved["step"], 1000
    else:
        first, seed = 0, 0
        writer = tierstore.SnapshotWriter(directory / "snapshot", model="ctr", version=1) if rank == 0 else None
        publisher.write_tables(writer)
        if writer is not None:
            writer.close()
            client.load_snapshot(directory / "snapshot")
        save(0)
    dist.barrier()
    for step in range(first + 1, steps + 1):
        if target is not None:
            target.step = step
        loss = model(*batch(seed + 2 * step + rank, step))
        if fault == "rank1-dies" and rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        if fault == "unreachable" and step in FAILS:  # it is raised on every rank
            with pytest.raises(TierstoreError):
                publisher.publish()
        else:
            publisher.publish()
            compare(step)
        if step % EVERY == 0:
            save(step)
    print("done", publisher.seq)
    os._exit(0)  # gloo's threads may wait for a rank that has left


if __name__ == "__main__":
    main()
