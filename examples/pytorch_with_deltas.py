"""A PyTorch model served with its embeddings, and brought up to date by deltas while it trains.

python examples/pytorch_with_deltas.py      # needs torch, onnxscript and tierstore[dense]; it leaves `data/` and others
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
        given = batch(64)
        target = (given["user_id"] % 2 == given["item_id"] % 2).float()[:, None]
        nn.functional.binary_cross_entropy(net(**given), target).backward()
        optimizer.step()


def main() -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
    asked = batch(200)
    with tierstore.open("data", host_budget="64MiB") as store:
        touched = TouchedRows(net)
        write_snapshot("snapshots/1", net, batch(4), model="ctr", version=1)
        store.load_snapshot("snapshots/1")
        for seq in (1, 2, 3):
            train(net, optimizer)
            write_delta(f"deltas-{seq}.arrow", touched, model="ctr", seq=seq, dense=export_dense(net, batch(4)))
            store.apply_delta(f"deltas-{seq}.arrow")
            served = store.model("ctr").predict({name: keys.numpy() for name, keys in asked.items()})
            with torch.no_grad():
                np.testing.assert_allclose(served, net(**asked).numpy(), atol=1e-5)
    print("served scores are the module's after each delta")


if __name__ == "__main__":
    main()
