"""A Keras model served with its embeddings and its dense part, and updated by deltas while it trains.

KERAS_BACKEND=torch python examples/keras_with_deltas.py      # needs keras, torch, onnxscript and tierstore[dense]; writes `data/` and others
"""

import keras
import numpy as np

import tierstore

TABLES = {"user_id": 1000, "item_id": 5000}
DIM = 16


def make_net() -> tuple[keras.Model, keras.Model]:
    """The model, and its dense part: the same layers, whose inputs are rows."""
    keys = {name: keras.Input((), dtype="int32", name=name) for name in TABLES}
    tables = {name: keras.layers.Embedding(count, DIM, name=f"{name}_table") for name, count in TABLES.items()}
    rows = {name: keras.Input((DIM,), name=name) for name in TABLES}
    layers = [keras.layers.Concatenate(), keras.layers.Dense(16, "relu"), keras.layers.Dense(1, "sigmoid")]
    top = keras.Sequential(layers[1:])
    net = keras.Model(keys, top(layers[0]([tables[name](keys[name]) for name in TABLES])))
    return net, keras.Model(rows, top(layers[0](list(rows.values()))))


def batch(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng()
    return {name: rng.integers(0, count, n, np.int32) for name, count in TABLES.items()}


def rows_of(net: keras.Model) -> dict[str, np.ndarray]:
    """A copy of each table, float32."""
    return {name: np.array(keras.ops.convert_to_numpy(net.get_layer(f"{name}_table").embeddings)) for name in TABLES}


def check(store: tierstore.Store, net: keras.Model) -> None:
    """Every row of every table, and scores."""
    ctr, requested = store.model("ctr"), batch(200)
    for name, rows in rows_of(net).items():
        np.testing.assert_array_equal(ctr.lookup(name, np.arange(len(rows))), rows)
    np.testing.assert_allclose(ctr.predict(requested), net.predict(requested, verbose=0), atol=1e-5)


def main() -> None:
    net, dense = make_net()
    net.compile("adam", "binary_crossentropy")
    written = rows_of(net)
    dense({name: rows[:2] for name, rows in written.items()})  # Keras exports what was called once
    with tierstore.SnapshotWriter("snapshots/1", model="ctr", version=1) as snapshot:
        for name, rows in written.items():
            snapshot.table(name, dim=DIM).write(np.arange(len(rows)), rows)
            snapshot.feature(name, table=name)
        dense.export("dense.onnx", format="onnx", verbose=False)
        snapshot.dense("dense.onnx")
    with tierstore.open("data", host_budget="64MiB") as store:
        store.load_snapshot("snapshots/1")
        for seq in (1, 2, 3):
            inputs = batch(640)
            net.fit(inputs, inputs["user_id"] % 2 == inputs["item_id"] % 2, verbose=0)
            now = rows_of(net)
            with tierstore.DeltaWriter(f"{seq}.arrow", model="ctr", seq=seq) as delta:
                for name, rows in now.items():
                    changed = np.flatnonzero((rows != written[name]).any(axis=1))
                    delta.upsert(name, changed, rows[changed])
                dense.export("dense.onnx", format="onnx", verbose=False)
                delta.dense("dense.onnx")
            written = now
            store.apply_delta(f"{seq}.arrow")
            check(store, net)
    print("served rows and scores are the model's after each delta")


if __name__ == "__main__":
    main()
