#!/usr/bin/env bash
# Feast: the hybrid online store takes no store of somebody else, and not even Feast's own by their paths
#
# The guess: a project has one online store, and `hybrid` is there to send embeddings to one and everything else to
# another, by a tag of the view. Its setting `type` is described as the import path of the store's class, so any store that works as
# `online_store: {type: package.MySqliteOnlineStore}` works within it.
#
# What happens: the last part of the path is put in lower case and looked up among the types. A class path never is one:
# Feast raises FeastOnlineStoreInvalidName, as `MySqliteOnlineStore` has become `mysqliteonlinestore`, which does not end with
# "OnlineStore". The same class path is taken outside `hybrid`. Feast's own stores go by their short names alone.
#
# Why it matters: who serves embeddings from a store of vectors of their own, beside Redis for counters, plans on this and
# finds at the first `feast apply` that embeddings need a project, and so a registry and a call, of their own.
#
# Source: https://github.com/feast-dev/feast/blob/v0.66.0/sdk/python/feast/infra/online_stores/hybrid_online_store/hybrid_online_store.py
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'feast==0.67.0'
cd "$folder"
cat > mine.py <<'PYTHON'
from typing import Literal

from feast.infra.online_stores.sqlite import SqliteOnlineStore, SqliteOnlineStoreConfig


class MySqliteOnlineStore(SqliteOnlineStore):
    pass


class MySqliteOnlineStoreConfig(SqliteOnlineStoreConfig):
    type: Literal["mine.MySqliteOnlineStore"] = "mine.MySqliteOnlineStore"
PYTHON
PYTHONPATH="$folder" "$folder/venv/bin/python" - <<'PYTHON'
import json
from datetime import datetime, timezone
from pathlib import Path

import feast
import pandas as pd
from feast import Entity, FeatureStore, FeatureView, Field, FileSource, ValueType
from feast.errors import FeastOnlineStoreInvalidName
from feast.types import Float32, Int64

print("feast", feast.__version__)
pd.DataFrame({"item_id": [1], "price": [1.0], "event_timestamp": [datetime.now(timezone.utc)]}).to_parquet("items.parquet")


def apply(name, online, tag):
    folder = Path(name)
    folder.mkdir()
    (folder / "feature_store.yaml").write_text(json.dumps({
        "project": name, "registry": str(folder.absolute() / "registry.db"), "provider": "local", "entity_key_serialization_version": 3,
        "offline_store": {"type": "file"}, "online_store": online,
    }))
    item = Entity(name="item", join_keys=["item_id"], value_type=ValueType.INT64)
    view = FeatureView(
        name="items", entities=[item], tags={"tribe": tag}, source=FileSource(path=str(Path("items.parquet").absolute()), timestamp_field="event_timestamp"),
        schema=[Field(name="item_id", dtype=Int64), Field(name="price", dtype=Float32)],
    )
    store = FeatureStore(str(folder))
    try:
        # what `apply` calls of an online store
        store._get_provider().online_store.update(store.config, [], [view], [], [item], True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def hybrid(kind):
    return {"type": "hybrid", "online_stores": [{"type": kind, "conf": {"path": str(Path("x.db").absolute())}}]}


found = {}
for name, online, tag in (
    ("alone", {"type": "mine.MySqliteOnlineStore", "path": str(Path("a.db").absolute())}, "x"),
    ("short", hybrid("sqlite"), "sqlite"),
    ("path", hybrid("feast.infra.online_stores.sqlite.SqliteOnlineStore"), "sqliteonlinestore"),
    ("within", hybrid("mine.MySqliteOnlineStore"), "mysqliteonlinestore"),
):
    found[name] = apply(name, online, tag)
    print(f"{name:7}", found[name])
assert found["alone"] == found["short"] == "taken", found
assert found["within"].startswith(FeastOnlineStoreInvalidName.__name__), found
assert found["path"].startswith(FeastOnlineStoreInvalidName.__name__), found
PYTHON
