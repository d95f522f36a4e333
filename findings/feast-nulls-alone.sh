#!/usr/bin/env bash
# Feast: a null that is written by itself is not written
#
# The guess: `write_to_online_store`, and a push to the online store, with a null for a feature replaces the value that is
# there, so this is how an embedding is withdrawn (an item that may not be recommended any more, a user who has objected).
#
# What happens: it depends on what else is in the frame. Feast looks at the frame before it calls the store, and where
# every feature of every row is null it warns and returns. The former vector is answered on, as PRESENT. Beside one
# row that has a vector the same null is written. For a view with one field of embeddings, a frame of nothing but
# withdrawals is exactly the frame that is passed over.
#
# Why it matters: a job that sends withdrawals one by one, as they come, withdraws none of them, and ends well. Call the
# store's `online_write_batch` through the provider, or send a row that is known to have a vector along.
#
# Source: https://github.com/feast-dev/feast/blob/v0.66.0/sdk/python/feast/feature_store.py (write_to_online_store)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'feast==0.67.0'
cd "$folder"
cat > feature_store.yaml <<'YAML'
project: shop
registry: registry.db
provider: local
entity_key_serialization_version: 3
offline_store: {type: file}
online_store: {type: sqlite, path: online.db}
YAML
"$folder/venv/bin/python" - <<'PYTHON'
import warnings
from datetime import datetime, timedelta, timezone

import feast
import numpy as np
import pandas as pd
from feast import Entity, FeatureStore, FeatureView, Field, FileSource, ValueType
from feast.types import Array, Float32, Int64

print("feast", feast.__version__)
now = datetime.now(timezone.utc)


def frame(vectors, moment):
    return pd.DataFrame({
        "item_id": list(vectors), "event_timestamp": moment,
        "embedding": [None if row is None else np.array(row, np.float32) for row in vectors.values()],
    })


frame({1: [1, 1]}, now).to_parquet("items.parquet")
item = Entity(name="item", join_keys=["item_id"], value_type=ValueType.INT64)
view = FeatureView(
    name="items", entities=[item], ttl=timedelta(0), source=FileSource(path="items.parquet", timestamp_field="event_timestamp"),
    schema=[Field(name="item_id", dtype=Int64), Field(name="embedding", dtype=Array(Float32))],
)
store = FeatureStore(".")
store.apply([item, view])


def read():
    return store.get_online_features(["items:embedding"], [{"item_id": 1}, {"item_id": 2}]).to_dict()["embedding"]


with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    store.write_to_online_store("items", frame({1: [1, 1], 2: [2, 2]}, now))
    store.write_to_online_store("items", frame({1: None}, now + timedelta(seconds=1)))
    alone = read()
    store.write_to_online_store("items", frame({1: None, 2: [3, 3]}, now + timedelta(seconds=2)))
    beside = read()
print("after a null alone:               ", alone)
print("after a null beside another vector:", beside)
print("warned:", {str(each.message) for each in warned if "empty feature columns" in str(each.message)})
assert alone == [[1.0, 1.0], [2.0, 2.0]], "the null was written"
assert beside == [None, [3.0, 3.0]], beside
PYTHON
