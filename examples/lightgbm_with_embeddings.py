"""A LightGBM model over embeddings: rows and scores from one service.

python examples/lightgbm_with_embeddings.py     # needs lightgbm, onnxmltools and tierstore[dense]; writes `data/`
"""

import lightgbm
import numpy as np
import onnxmltools
from onnxmltools.convert.common.data_types import FloatTensorType

import tierstore
from tierstore.onnx import join_inputs

RNG = np.random.default_rng(0)
USERS, ITEMS = RNG.normal(size=(1000, 16)).astype(np.float32), RNG.normal(size=(5000, 16)).astype(np.float32)


def main() -> None:
    user, item, hour = RNG.integers(0, 1000, 3000), RNG.integers(0, 5000, 3000), RNG.random((3000, 2), np.float32)
    columns = np.hstack([USERS[user], ITEMS[item], hour])
    model = lightgbm.LGBMRegressor(n_estimators=20, verbose=-1).fit(columns, USERS[user, 0] * ITEMS[item, 0])

    graph = onnxmltools.convert_lightgbm(model, initial_types=[("x", FloatTensorType([None, 34]))])
    with tierstore.SnapshotWriter("snapshots/1", model="rank", version=1) as snapshot:
        snapshot.table("user", dim=16).write(np.arange(1000), USERS)
        snapshot.table("item", dim=16).write(np.arange(5000), ITEMS)
        snapshot.feature("user_id", table="user")
        snapshot.feature("item_id", table="item")
        snapshot.dense(join_inputs(graph, {"user_id": 16, "item_id": 16, "hour": 2}))
    with tierstore.open("data", host_budget="64MiB") as store:
        store.load_snapshot("snapshots/1")
        scores = store.model("rank").predict({"user_id": user, "item_id": item, "hour": hour})
    np.testing.assert_allclose(np.ravel(scores), model.predict(columns), atol=1e-4)
    print("served scores are LightGBM's")


if __name__ == "__main__":
    main()
