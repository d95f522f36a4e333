"""TorchRec's own DLRM, served with its embeddings, updated by a delta, and then reading its tables from the store.

python examples/torchrec_with_deltas.py      # needs torchrec, fbgemm-gpu-cpu, onnxscript and tierstore[dense]; writes `data/` and others
"""

from typing import Any

import numpy as np
import torch
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import tierstore
from tierstore.torch import TouchedRows, export_dense, swap_embeddings, write_delta, write_snapshot

FEATURES = ["user", "clicked"]


def make_net() -> Any:
    users = EmbeddingBagConfig(name="users", embedding_dim=8, num_embeddings=1000, feature_names=["user"])
    goods = EmbeddingBagConfig(name="goods", embedding_dim=8, num_embeddings=5000, feature_names=["clicked"])
    collection = EmbeddingBagCollection(tables=[users, goods], device=torch.device("cpu"))
    return DLRM(collection, dense_in_features=3, dense_arch_layer_sizes=[16, 8], over_arch_layer_sizes=[16, 1])


def batch(n: int) -> dict[str, Any]:
    """One user, and 0 to 4 goods that were clicked, an item."""
    lengths = torch.cat([torch.ones(n, dtype=torch.int64), torch.randint(0, 5, (n,))])
    values = torch.randint(0, 1000, (int(lengths.sum()),))
    jagged = KeyedJaggedTensor.from_lengths_sync(keys=FEATURES, values=values, lengths=lengths)
    return {"dense_features": torch.rand(n, 3), "sparse_features": jagged}


def request(inputs: dict[str, Any]) -> dict[str, Any]:
    bags = inputs["sparse_features"].to_dict()
    pooled = {name: (bags[name].values().numpy(), bags[name].offsets()[:-1].numpy()) for name in FEATURES}
    return {"dense_features": inputs["dense_features"].numpy(), **pooled}


def check(store: tierstore.Store, net: Any) -> None:
    requested = batch(50)
    with torch.no_grad():
        expected = net(**requested).numpy()
    np.testing.assert_allclose(store.model("ctr").predict(request(requested)), expected, atol=1e-5)


def main() -> None:
    torch.manual_seed(0)
    net = make_net()
    with tierstore.open("data", host_budget="64MiB") as store:
        touched = TouchedRows(net)
        write_snapshot("snapshots/1", net, batch(4), model="ctr", version=1, touched=touched)
        store.load_snapshot("snapshots/1")
        check(store, net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        net(**batch(64)).square().sum().backward()
        optimizer.step()
        write_delta("1.arrow", touched, model="ctr", seq=1, dense=export_dense(net, batch(4)))
        store.apply_delta("1.arrow")
        check(store, net)
        swap_embeddings(net, store.model("ctr"))  # from here on the module itself reads the store
        check(store, net)
    print("served scores are the module's, before and after the delta")


if __name__ == "__main__":
    main()
