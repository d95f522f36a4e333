"""A PyTorch model served with its embeddings, and updated by deltas while it trains.

python examples/pytorch_with_deltas.py      # needs torch, onnxscript and tierstore[dense]; writes `data/` and others
"""

import numpy as np
import torch
from torch import nn

import tierstore
from tierstore.torch import TouchedRows, export_dense, write_delta, write_snapshot


class Net(nn.Module):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(1000, 16), nn.Embedding(5000, 16)
        self.top = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, user_id: torch.Tensor, item_id: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.top(torch.cat([self.user(user_id), self.item(item_id)], 1))
        return scores


def batch(n: int) -> dict[str, torch.Tensor]:
    return {"user_id": torch.randint(0, 1000, (n,)), "item_id": torch.randint(0, 5000, (n,))}


def train(net: Net, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(10):
        optimizer.zero_grad()
        inputs = batch(64)
        target = (inputs["user_id"] % 2 == inputs["item_id"] % 2).float()[:, None]
        nn.functional.binary_cross_entropy(net(**inputs), target).backward()
        optimizer.step()


def check(store: tierstore.Store, net: Net) -> None:
    requested = batch(200)
    served = store.model("ctr").predict({name: keys.numpy() for name, keys in requested.items()})
    with torch.no_grad():
        np.testing.assert_allclose(served, net(**requested).numpy(), atol=1e-5)


def main() -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
    with tierstore.open("data", host_budget="64MiB") as store:
        touched = TouchedRows(net)
        write_snapshot("snapshots/1", net, batch(4), model="ctr", version=1)
        store.load_snapshot("snapshots/1")
        for seq in (1, 2, 3):
            train(net, optimizer)
            write_delta(f"deltas-{seq}.arrow", touched, model="ctr", seq=seq, dense=export_dense(net, batch(4)))
            store.apply_delta(f"deltas-{seq}.arrow")
            check(store, net)
    print("served scores are the module's after each delta")


if __name__ == "__main__":
    main()
