"""A PyTorch model that scores behind FastAPI, with its embeddings in a store of the same process.

python examples/pytorch_in_fastapi.py      # needs torch, fastapi and httpx; writes `data/` and `snapshots/`
"""

import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from torch import nn

import tierstore
from tierstore.torch import swap_embeddings, write_snapshot


class Net(nn.Module):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(1000, 16), nn.Embedding(5000, 16)
        self.top = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, user_id: torch.Tensor, item_id: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.top(torch.cat([self.user(user_id), self.item(item_id)], 1))
        return scores


def service(net: nn.Module) -> FastAPI:
    app = FastAPI()

    @app.post("/score")
    def score(user: int, items: list[int]) -> list[float]:
        with torch.inference_mode():
            found: list[float] = net(torch.full((len(items),), user), torch.tensor(items))[:, 0].tolist()
        return found

    return app


def main() -> None:
    net = Net()
    example = {"user_id": torch.tensor([1, 2]), "item_id": torch.tensor([3, 4])}
    write_snapshot("snapshots/1", net, example, model="ctr", version=1, dense=False)
    with torch.no_grad():
        wanted = net(torch.tensor([7, 7]), torch.tensor([30, 40]))[:, 0]
    with tierstore.open("data", host_budget="64MiB") as store:
        store.load_snapshot("snapshots/1")
        app = service(swap_embeddings(net, store.model("ctr")))
        answer = TestClient(app).post("/score", params={"user": 7}, json=[30, 40])
    torch.testing.assert_close(torch.tensor(answer.json()), wanted)
    print("served scores are the module's")


if __name__ == "__main__":
    main()
