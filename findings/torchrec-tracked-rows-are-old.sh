#!/usr/bin/env bash
# TorchRec's delta tracker tells each row as it was before it was trained, by its number within the rank's shard; clear() of one of two consumers clears nothing.
#
# Guess: with TrackingMode.EMBEDDING, `get_unique` gives the rows to publish: the ids that changed since the last call, and their values now, as the class is
# there to stream updated embeddings. `clear("monitor")` makes that consumer begin anew.
# What happens: of each id the value at its first look-up since the last call is kept, which is the one before any update (the mode is made to measure how far rows
# have moved), so a publisher sends what it sent the time before. Ids count from the first row of the shard: id 6 of a table over two ranks is 2, and what
# two ranks tell cannot be told apart. `clear` with a name does nothing as soon as there are two consumers; no error, no line in the log.
# Why it matters: whoever sends these pairs to a store serves rows that are one interval old, half of them under ids of other items. Take the ids, add the shard's
# offset, and read the rows from the weights.
# Source: https://github.com/meta-pytorch/torchrec/blob/main/torchrec/distributed/model_tracker/model_delta_tracker.py (UPDATE_MODE_MAP, clear) and types.py (UpdateMode)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip="$work/venv/bin/pip install --quiet --disable-pip-version-check"
$pip torch==2.13.0 fbgemm-gpu-cpu==1.8.0 torchmetrics==1.0.3 tensordict==0.15.3 pyre-extensions==0.0.32 tqdm==4.70.1 numpy==2.4.6 setuptools
$pip --no-deps torchrec==1.8.0 # it asks for fbgemm-gpu, which needs CUDA

cat > "$work/run.py" <<'PY'
import sys

import torch
import torch.distributed as dist
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig, TrackingMode
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

RANKS, ROWS = 2, 8
CONSUMERS = ["publisher", "monitor"]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        table = EmbeddingConfig(name="item", embedding_dim=4, num_embeddings=ROWS, feature_names=["id"])
        self.items = EmbeddingCollection(tables=[table], device=torch.device("meta"))
        self.over = torch.nn.Linear(1, 1)  # without a dense part the tracker cannot be made

    def forward(self, ids):
        return self.items(ids)["id"].values().sum() + 0 * self.over.weight.sum()


def rank(number, meeting):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=RANKS)
    net = Net()
    apply_optimizer_in_backward(torch.optim.SGD, net.items.parameters(), {"lr": 0.5})
    sharder = EmbeddingCollectionSharder()
    plan = construct_module_sharding_plan(
        net.items, {"item": row_wise(compute_kernel="fused")},
        sharder=sharder, local_size=RANKS, world_size=RANKS, device_type="cpu",
    )  # fmt: skip
    model = DistributedModelParallel(
        net, device=torch.device("cpu"), plan=ShardingPlan({"items": plan}), sharders=[sharder]
    )
    model.init_torchrec_delta_tracker(
        DeltaTrackerConfig(tracking_mode=TrackingMode.EMBEDDING, consumers=CONSUMERS)
    )
    (shard,) = model.state_dict()["items.embeddings.item.weight"].local_shards()
    shard.tensor.fill_(10.0)
    tracker = model.get_delta_tracker()
    ids = KeyedJaggedTensor.from_lengths_sync(["id"], torch.tensor([1, 6]), torch.tensor([1, 1]))
    for _ in range(3):
        model(ids).backward()
    tracker.clear("monitor")
    lines = []
    for consumer in CONSUMERS:
        ((_, told),) = tracker.get_unique(consumer).items()
        lines.append(f"rank {number} tells the {consumer}: ids {told.ids.tolist()}, first number {told.states[:, 0].tolist()}")
    there = [r for r in range(len(shard.tensor)) if shard.tensor[r, 0] != 10.0]
    first = shard.metadata.shard_offsets[0]
    lines.append(f"rank {number} has: ids {[first + r for r in there]}, first number {shard.tensor[there, 0].tolist()}")
    for turn in range(RANKS):
        if turn == number:
            print("\n".join(lines), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, args=(sys.argv[1],), nprocs=RANKS)
PY

echo "torch 2.13.0, torchrec 1.8.0, fbgemm-gpu-cpu 1.8.0"
(cd "$work" && venv/bin/python run.py "$work/meeting" 2>/dev/null) | grep '^rank' | tee "$work/seen"
diff "$work/seen" - <<'WANT'
rank 0 tells the publisher: ids [1], first number [10.0]
rank 0 tells the monitor: ids [1], first number [10.0]
rank 0 has: ids [1], first number [8.5]
rank 1 tells the publisher: ids [2], first number [10.0]
rank 1 tells the monitor: ids [2], first number [10.0]
rank 1 has: ids [6], first number [8.5]
WANT
