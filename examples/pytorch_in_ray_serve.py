"""A PyTorch model that scores in Ray Serve, with its embeddings read from a service: replicas come and go, and hold no tables.

python examples/pytorch_in_ray_serve.py      # needs torch and ray[serve]; writes `data/` and `snapshots/`
"""

import torch
from ray import serve
from torch import nn

import tierstore
from tierstore.config import Settings
from tierstore.service.server import ServerThread
from tierstore.torch import swap_embeddings, write_snapshot


class Net(nn.Module):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(1000, 16), nn.Embedding(5000, 16)
        self.top = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, user_id: torch.Tensor, item_id: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.top(torch.cat([self.user(user_id), self.item(item_id)], 1))
        return scores


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0.5})
class Scores:
    def __init__(self, url: str, dense: dict[str, torch.Tensor]) -> None:
        self.net = Net()
        model = tierstore.Client(url).model("ctr")
        swap_embeddings(self.net, model, features={"user": "user_id", "item": "item_id"})
        self.net.load_state_dict(dense)

    def __call__(self, user: int, items: list[int]) -> list[float]:
        with torch.inference_mode():
            found: list[float] = self.net(torch.full((len(items),), user), torch.tensor(items))[:, 0].tolist()
        return found


def main() -> None:
    net = Net()
    example = {"user_id": torch.tensor([1, 2]), "item_id": torch.tensor([3, 4])}
    write_snapshot("snapshots/1", net, example, model="ctr", version=1, dense=False)
    with torch.no_grad():
        wanted = net(torch.tensor([7, 7]), torch.tensor([30, 40]))[:, 0]
    dense = {name: value for name, value in net.state_dict().items() if name.startswith("top.")}
    settings = Settings(data="data", port=0, host_budget="64MiB")
    with tierstore.Store(settings) as store, ServerThread(store, settings) as server:  # elsewhere: `tierstore serve`
        store.load_snapshot("snapshots/1")
        scores = serve.run(Scores.bind(server.url, dense), route_prefix=None)
        answer = scores.remote(7, [30, 40]).result(timeout_s=60)
        serve.shutdown()
    torch.testing.assert_close(torch.tensor(answer), wanted)
    print("served scores are the module's")


if __name__ == "__main__":
    main()
