"""Feast in front of a service: each function `case_…` is a test. Run in an environment that has Feast.

Prints, as JSON, the traceback of each case that failed and null for those that passed.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from feast import BatchFeatureView, Entity, FeatureStore, FeatureView, Field, FileSource, PushSource, ValueType
from feast.protos.feast.serving.ServingService_pb2 import FieldStatus
from feast.protos.feast.types.EntityKey_pb2 import EntityKey
from feast.protos.feast.types.Value_pb2 import FloatList, Value
from feast.types import Array, Float32, Float64, Int32, Int64, String

from tierstore import Client
from tierstore.errors import Conflict, InvalidInput, NotFound, Unreachable
from tierstore.feast import TierstoreOnlineStore

NOW = datetime.now(UTC).replace(microsecond=123457)
DIM = 4
OURS = "tierstore.feast.TierstoreOnlineStore"


class Scene:
    """A feature store of its own, in front of the service at `url`; files are in `folder`."""

    def __init__(self, url: str, folder: Path, project: str) -> None:
        self.url, self.folder, self.project = url, folder, project
        folder.mkdir()

    def store(self, online: dict[str, Any] | None = None, name: str = "ours") -> FeatureStore:
        where = self.folder / name
        where.mkdir(exist_ok=True)
        (where / "feature_store.yaml").write_text(
            json.dumps({
                "project": self.project, "registry": str(where / "registry.db"), "provider": "local",
                "entity_key_serialization_version": 3, "offline_store": {"type": "file"},
                "online_store": {"type": OURS, "url": self.url} if online is None else online,
            })
        )  # fmt: skip
        return FeatureStore(str(where))

    def sqlite(self) -> FeatureStore:
        return self.store({"type": "sqlite", "path": str(self.folder / "online.db")}, "sqlite")

    def source(self, table: pa.Table | None = None, name: str = "items") -> FileSource:
        path = self.folder / f"{name}.parquet"
        pq.write_table(rows_of([1], [[0.0] * DIM], [NOW]) if table is None else table, path)
        return FileSource(
            name=name, path=str(path), timestamp_field="event_timestamp", created_timestamp_column="created"
        )

    def view(self, source: Any = None, **changes: Any) -> FeatureView:
        return view_of(self.source() if source is None else source, **changes)

    def client(self) -> Client:
        return Client(self.url)


ITEM = Entity(name="item", join_keys=["item_id"], value_type=ValueType.INT64)
TEXT = Entity(name="text", join_keys=["text_id"], value_type=ValueType.STRING)


def view_of(source: Any, *, name: str = "items", kind: type = FeatureView, **changes: Any) -> FeatureView:
    key = Field(name="item_id", dtype=Int64)
    embedding = Field(name="embedding", dtype=Array(Float32), vector_length=DIM)
    fields = {"entities": [ITEM], "schema": [key, embedding], "ttl": timedelta(0), "online": True}
    return kind(name=name, source=source, **(fields | changes))


def rows_of(keys: Sequence[Any], vectors: Any, times: Sequence[datetime], kind: pa.DataType | None = None) -> pa.Table:
    return pa.table({
        "item_id": keys, "embedding": pa.array(list(vectors), pa.list_(kind or pa.float32())),
        "event_timestamp": pa.array(times, pa.timestamp("us", "UTC")),
        "created": pa.array([NOW] * len(keys), pa.timestamp("us", "UTC")),
    })  # fmt: skip


def frame(keys: Sequence[Any], vectors: Sequence[Any], times: Sequence[datetime]) -> pd.DataFrame:
    return pd.DataFrame({
        "item_id": keys, "embedding": [None if row is None else np.array(row, np.float32) for row in vectors],
        "event_timestamp": times, "created": [NOW] * len(keys),
    })  # fmt: skip


def read(
    store: FeatureStore, keys: Sequence[Any], *, key: str = "item_id", feature: str = "items:embedding"
) -> list[Any]:
    """Of each key the value, Feast's status and the event time, as Feast answers them."""
    proto = store.get_online_features([feature], [{key: each} for each in keys]).proto
    place = list(proto.metadata.feature_names.val).index(feature.split(":")[1])
    result = proto.results[place]
    found = []
    for value, status, moment in zip(result.values, result.statuses, result.event_timestamps, strict=True):
        kind = value.WhichOneof("val")
        numbers = None if kind is None else list(getattr(value, kind).val)
        when = moment.ToDatetime(UTC) if moment.ByteSize() else None
        found.append((numbers, FieldStatus.Name(status), when))
    return found


def entity_key(value: int) -> EntityKey:
    return EntityKey(join_keys=["item_id"], entity_values=[Value(int64_val=value)])


def row(key: int, vector: Sequence[float] | None, time: datetime, created: datetime | None = None) -> Any:
    value = Value() if vector is None else Value(float_list_val=FloatList(val=vector))
    return entity_key(key), {"embedding": value}, time, created


def refused(kind: type[Exception], call: Callable[[], Any]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"expected {kind.__name__}")


def same(found: Any, expected: Any) -> None:
    assert found == expected, f"\nfound    {found}\nexpected {expected}"


# --- rows


def case_what_is_materialized_is_read_back_to_the_bit(scene: Scene) -> None:
    random = np.random.default_rng(7)
    keys = np.unique(np.append(random.integers(-(2**63), 2**63 - 1, 3000), [0, -1, 2**63 - 1, -(2**63)]))
    bits = random.integers(0, 2**32, (len(keys), DIM), np.uint32)
    vectors = bits.view(np.float32)
    vectors[~np.isfinite(vectors)] = -0.0
    vectors[0] = [np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal, -0.0, 1.0]
    times = [NOW - timedelta(microseconds=int(n)) for n in random.integers(0, 10**13, len(keys))]
    store = scene.store()
    view = scene.view(scene.source(rows_of(keys, vectors, times)))
    store.apply([ITEM, view])
    store.materialize(NOW - timedelta(days=400), NOW + timedelta(minutes=1))
    found = read(store, keys.tolist())
    assert np.array([numbers for numbers, _, _ in found], np.float32).tobytes() == vectors.tobytes()
    same([time for _, _, time in found], times)
    same({status for _, status, _ in found}, {"PRESENT"})
    with scene.client() as client:  # and by those who look rows up without Feast
        rows, there = client.lookup(f"{scene.project}-items", "embedding", keys, return_found=True)
    assert there.all()
    assert rows.tobytes() == vectors.tobytes()


def case_text_keys_and_an_incremental_materialization(scene: Scene) -> None:
    store = scene.store()
    fields = [Field(name="text_id", dtype=String), Field(name="embedding", dtype=Array(Float32), vector_length=DIM)]
    keys = ["", "a", "ü", "日本", "x" * 300]
    vectors = np.arange(len(keys) * DIM, dtype=np.float32).reshape(-1, DIM)
    table = rows_of(keys, vectors, [NOW] * len(keys)).rename_columns(
        ["text_id", "embedding", "event_timestamp", "created"]
    )
    view = scene.view(scene.source(table), entities=[TEXT], schema=fields, ttl=timedelta(days=3))
    store.apply([TEXT, view])
    store.materialize_incremental(NOW + timedelta(minutes=1))
    same([numbers for numbers, _, _ in read(store, [*keys, "b"], key="text_id")], [*vectors.tolist(), None])


def case_64_bit_numbers_are_held_exactly_or_refused_or_rounded_where_asked_for(scene: Scene) -> None:
    fields = [Field(name="item_id", dtype=Int64), Field(name="embedding", dtype=Array(Float64), vector_length=2)]
    view = scene.view(schema=fields)
    store = scene.store()
    store.apply([ITEM, view])
    exact = pd.DataFrame(
        {"item_id": [1], "embedding": [np.array([0.5, -0.0])], "event_timestamp": [NOW], "created": [NOW]}
    )
    store.write_to_online_store("items", exact)
    odd = exact.assign(embedding=[np.array([0.1, 1.0])], item_id=[2])
    message = refused(InvalidInput, lambda: store.write_to_online_store("items", odd))
    assert "key 2" in message, message
    assert "round_float64" in message, message
    same(read(store, [2])[0][0], None)
    rounding = scene.store({"type": OURS, "url": scene.url, "round_float64": True})
    rounding.write_to_online_store("items", odd)
    same([numbers for numbers, _, _ in read(store, [1, 2])], [[0.5, -0.0], [float(np.float32(0.1)), 1.0]])


def case_vectors_that_cannot_be_held_are_refused_with_their_key(scene: Scene) -> None:
    store = scene.store()
    store.apply([ITEM, scene.view()])
    store.write_to_online_store("items", frame([1], [[1] * DIM], [NOW]))
    for vector, why in (
        ([1.0] * 3, "expected 4 numbers, got 3"),
        ([], "expected 4 numbers, got 0"),
        ([np.nan] * DIM, "finite"),
        ([np.inf] * DIM, "finite"),
    ):
        bad = frame([1, 77], [[2] * DIM, vector], [NOW, NOW])
        message = refused(InvalidInput, lambda bad=bad: store.write_to_online_store("items", bad))
        assert "key 77" in message, message
        assert why in message, message
    same(read(store, [1, 77]), [([1.0] * DIM, "PRESENT", NOW), (None, "NOT_FOUND", None)])  # all of it or nothing


def case_keys_of_another_type_are_refused(scene: Scene) -> None:
    store = scene.store()
    view = scene.view()
    store.apply([ITEM, view])
    online, config = store._get_provider().online_store, store.config
    for value in (Value(string_val="1"), Value(), Value(double_val=1.0)):
        key = EntityKey(join_keys=["item_id"], entity_values=[value])
        assert "item_id" in refused(InvalidInput, lambda key=key: online.online_read(config, view, [key]))


def case_an_older_event_changes_nothing(scene: Scene) -> None:
    store = scene.store()
    store.apply([ITEM, scene.view()])
    hour = timedelta(hours=1)
    store.write_to_online_store("items", frame([1, 2], [[1] * DIM, [1] * DIM], [NOW, NOW]))
    store.write_to_online_store(
        "items", frame([1, 2, 3], [[2] * DIM] * 3, [NOW - timedelta(microseconds=1), NOW + hour, NOW - hour])
    )
    same(read(store, [1, 2, 3]), [
        ([1.0] * DIM, "PRESENT", NOW), ([2.0] * DIM, "PRESENT", NOW + hour), ([2.0] * DIM, "PRESENT", NOW - hour),
    ])  # fmt: skip
    store.write_to_online_store("items", frame([1], [[3] * DIM], [NOW]))  # a correction
    same(read(store, [1]), [([3.0] * DIM, "PRESENT", NOW)])


def case_within_a_batch_the_newest_row_of_a_key_counts(scene: Scene) -> None:
    store = scene.store()
    view = scene.view()
    store.apply([ITEM, view])
    online, second, told = store._get_provider().online_store, timedelta(seconds=1), []
    naive = NOW.replace(tzinfo=None)
    data = [
        row(1, [1] * DIM, NOW + second), row(1, [2] * DIM, NOW),
        row(2, [1] * DIM, NOW, NOW + second), row(2, [2] * DIM, NOW, NOW), row(2, [3] * DIM, NOW),
        row(3, [1] * DIM, NOW), row(3, [2] * DIM, naive),  # without a zone: UTC
    ]  # fmt: skip
    online.online_write_batch(store.config, view, data, told.append)
    same([numbers for numbers, _, _ in read(store, [1, 2, 3])], [[1.0] * DIM, [1.0] * DIM, [2.0] * DIM])
    same(sum(told), len(data))
    online.online_write_batch(store.config, view, [], None)


def case_a_null_has_a_time_and_no_value(scene: Scene) -> None:
    store, second = scene.store(), timedelta(seconds=1)
    store.apply([ITEM, scene.view()])
    store.write_to_online_store("items", frame([1, 2], [[1] * DIM, None], [NOW, NOW]))
    # Feast itself passes over a frame in which nothing but null is written
    store.write_to_online_store("items", frame([1, 4], [None, [4] * DIM], [NOW + second] * 2))
    same(read(store, [1, 2, 3]), [
        (None, "NOT_FOUND", NOW + second), (None, "NOT_FOUND", NOW), (None, "NOT_FOUND", None),
    ])  # fmt: skip
    store.write_to_online_store("items", frame([1], [[9] * DIM], [NOW]))  # older than the null
    store.write_to_online_store("items", frame([2], [[2] * DIM], [NOW + second]))
    same(read(store, [1, 2]), [(None, "NOT_FOUND", NOW + second), ([2.0] * DIM, "PRESENT", NOW + second)])


def case_a_value_older_than_the_ttl_has_a_time_and_no_value(scene: Scene) -> None:
    store = scene.store()
    store.apply([ITEM, scene.view(ttl=timedelta(days=1))])
    old, young = NOW - timedelta(days=1, minutes=1), NOW - timedelta(hours=23)
    store.write_to_online_store("items", frame([1, 2], [[1] * DIM, [2] * DIM], [old, young]))
    same(read(store, [1, 2]), [(None, "NOT_FOUND", old), ([2.0] * DIM, "PRESENT", young)])
    store.apply([ITEM, scene.view(ttl=timedelta(hours=22))])
    same(read(store, [2]), [(None, "NOT_FOUND", young)])
    message = refused(Conflict, lambda: store.apply([ITEM, scene.view(ttl=timedelta(days=2))]))
    assert "'items'" in message, message
    assert "1 day" in message, message


def case_feasts_sqlite_store_answers_the_same_but_for_nulls_and_ttl(scene: Scene) -> None:
    times = [NOW.replace(microsecond=0), NOW.replace(microsecond=0) - timedelta(days=9)]
    table = rows_of([1, 2, 3], [[1.5] * DIM, [2.5] * DIM, None], [times[0], times[1], times[0]])
    found = []
    for store in (scene.sqlite(), scene.store()):
        store.apply([ITEM, scene.view(scene.source(table), ttl=timedelta(days=1))])
        store.materialize(NOW - timedelta(days=30), NOW + timedelta(minutes=1))
        found.append(read(store, [1, 2, 3, 4, 1]))
    theirs, ours = found
    same([theirs[place] for place in (0, 3, 4)], [ours[place] for place in (0, 3, 4)])
    same(theirs[1:3], [([2.5] * DIM, "PRESENT", times[1]), (None, "PRESENT", times[0])])
    same(ours[1:3], [(None, "NOT_FOUND", times[1]), (None, "NOT_FOUND", times[0])])


def case_event_times_of_any_year(scene: Scene) -> None:
    store = scene.store()
    views = [scene.view(), scene.view(name="aging", ttl=timedelta(days=1))]
    store.apply([ITEM, *views])
    times = [datetime(year, 1, 1, microsecond=year, tzinfo=UTC) for year in (1, 1900, 1969, 1970, 2300, 9999)]
    online, config = store._get_provider().online_store, store.config
    for view in views:
        for key, time_ in enumerate(times):  # each in a delta of its own
            online.online_write_batch(config, view, [row(key, [key] * DIM, time_)], None)
    found = read(store, range(len(times)))
    same(found, [([float(key)] * DIM, "PRESENT", time_) for key, time_ in enumerate(times)])
    aging = read(store, range(len(times)), feature="aging:embedding")
    same([numbers for numbers, _, _ in aging], [None] * 4 + [[4.0] * DIM, [5.0] * DIM])


def case_pushed_rows(scene: Scene) -> None:
    push = PushSource(name="pushed", batch_source=scene.source())
    store = scene.store()
    store.apply([ITEM, push, scene.view(push)])
    store.push("pushed", frame([5], [[5] * DIM], [NOW]))
    same(read(store, [5]), [([5.0] * DIM, "PRESENT", NOW)])


def case_asyncio_reads_and_writes_the_same(scene: Scene) -> None:
    store = scene.store()
    view = scene.view()
    store.apply([ITEM, view])
    online, config = store._get_provider().online_store, store.config
    assert online.async_supported.read
    assert online.async_supported.write

    async def in_a_loop(key: int) -> Any:
        await online.online_write_batch_async(config, view, [row(key, [key] * DIM, NOW)], None)
        answer = await online.online_read_async(config, view, [entity_key(key), entity_key(99)])
        await online.close()
        return answer

    for key in (1, 2):  # each in a loop of its own
        (time, values), missing = asyncio.run(in_a_loop(key))
        same((time, list(values["embedding"].float_list_val.val), missing), (NOW, [float(key)] * DIM, (None, None)))
    same([numbers for numbers, _, _ in read(store, [1, 2])], [[1.0] * DIM, [2.0] * DIM])


# --- writers


class Between:
    """In place of a client: calls `first` before its delta is sent, once, and `then` after."""

    def __init__(self, client: Client, first: Callable[[], None], then: Callable[[], None]) -> None:
        self._client, self._first, self._then = client, first, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def apply_delta(self, *args: Any, **options: Any) -> Any:
        first, self._first = self._first, lambda: None
        first()
        result = self._client.apply_delta(*args, **options)
        then, self._then = self._then, lambda: None
        then()
        return result


def between(
    store: FeatureStore, first: Callable[[], None] = lambda: None, then: Callable[[], None] = lambda: None
) -> None:
    online = store._get_provider().online_store
    options, client = online._client
    online._client = options, Between(client, first, then)


def case_a_writer_beside_another_overwrites_nothing_newer(scene: Scene) -> None:
    one, other = scene.store(), scene.store(name="other")
    for store in (one, other):
        store.apply([ITEM, scene.view()])
    newer = frame([1, 2], [[2] * DIM] * 2, [NOW, NOW - timedelta(hours=2)])
    between(one, first=lambda: other.write_to_online_store("items", newer))
    one.write_to_online_store("items", frame([1, 2], [[1] * DIM] * 2, [NOW - timedelta(hours=1)] * 2))
    same(read(one, [1, 2]), [([2.0] * DIM, "PRESENT", NOW), ([1.0] * DIM, "PRESENT", NOW - timedelta(hours=1))])


def case_many_writers_leave_the_newest_row_of_each_key(scene: Scene) -> None:
    stores = [scene.store(name=f"writer{n}") for n in range(4)]
    stores[0].apply([ITEM, scene.view()])
    view, errors = scene.view(), []
    view.entity_columns = [Field(name="item_id", dtype=Int64)]
    onlines = [(store._get_provider().online_store, store.config) for store in stores]
    numbers = np.random.default_rng(3).permutation(80).reshape(4, 20)

    def write(writer: int) -> None:
        online, config = onlines[writer]
        try:
            for number in numbers[writer].tolist():
                rows = [row(number % 5, [number] * DIM, NOW + timedelta(seconds=number))]
                online.online_write_batch(config, view, rows, None)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same(errors, [])
    stores[0].refresh_registry()
    same([numbers for numbers, _, _ in read(stores[0], range(5))], [[75.0 + key] * DIM for key in range(5)])


def case_a_write_whose_answer_was_lost_can_be_sent_again(scene: Scene) -> None:
    store = scene.store()
    store.apply([ITEM, scene.view()])

    def lost() -> None:
        raise Unreachable("lost")

    between(store, then=lost)
    rows = frame([1], [[1] * DIM], [NOW])
    refused(Unreachable, lambda: store.write_to_online_store("items", rows))
    store.write_to_online_store("items", rows)
    same(read(store, [1]), [([1.0] * DIM, "PRESENT", NOW)])


def case_a_store_may_be_copied_to_another_process(scene: Scene) -> None:
    store = scene.store()
    view = scene.view()
    store.apply([ITEM, view])
    store.write_to_online_store("items", frame([1], [[1] * DIM], [NOW]))
    copy: TierstoreOnlineStore = pickle.loads(pickle.dumps(store._get_provider().online_store))
    same(copy.online_read(store.config, view, [entity_key(1)])[0][0], NOW)


# --- views


def case_views_that_cannot_be_held_are_refused_by_name_and_nothing_is_made(scene: Scene) -> None:
    key, embedding = (
        Field(name="item_id", dtype=Int64),
        Field(name="embedding", dtype=Array(Float32), vector_length=DIM),
    )
    user = Entity(name="user", join_keys=["user_id"], value_type=ValueType.INT64)
    real = Entity(name="real", join_keys=["real_id"], value_type=ValueType.DOUBLE)
    source = scene.source()
    bad = {
        "two_fields": ({"schema": [key, embedding, Field(name="price", dtype=Float32)]}, ["embedding", "price"]),
        "a_number": ({"schema": [key, Field(name="price", dtype=Float32)]}, ["price", "Array(Float32)"]),
        "integers": ({"schema": [key, Field(name="codes", dtype=Array(Int32), vector_length=2)]}, ["codes"]),
        "no_length": ({"schema": [key, Field(name="vector", dtype=Array(Float32))]}, ["vector_length=64"]),
        "too_long": ({"schema": [key, Field(name="vector", dtype=Array(Float32), vector_length=65537)]}, ["65536", "65537"]),
        "two_keys": ({"entities": [ITEM, user], "schema": [key, Field(name="user_id", dtype=Int64), embedding]}, ["item_id", "user_id"]),
        "no_key": ({"entities": [], "schema": [embedding]}, ["one entity"]),
        "real_key": ({"entities": [real], "schema": [Field(name="real_id", dtype=Float64), embedding]}, ["real_id"]),
        "n" * 70: ({}, ["1 to 64"]),
    }  # fmt: skip
    store = scene.store()
    good = view_of(source, name="good")
    views = [view_of(source, name=name, **changes) for name, (changes, _) in bad.items()]
    message = refused(InvalidInput, lambda: store.apply([ITEM, user, real, good, *views]))
    lines = message.splitlines()
    same(len(lines), len(bad))
    for line, (name, (_, words)) in zip(sorted(lines), sorted(bad.items()), strict=True):
        assert f"'{name}'" in line, line
        assert all(word in line for word in words), line
    with scene.client() as client:
        assert not [name for name in client.models() if name.startswith(scene.project + "-")]


def case_applying_again_changes_nothing_and_another_form_is_refused(scene: Scene) -> None:
    store = scene.store()
    store.apply([ITEM, scene.view()])
    store.write_to_online_store("items", frame([1], [[1] * DIM], [NOW]))
    store.apply([ITEM, scene.view(tags={"owner": "us"})])
    scene.store(name="other").apply([ITEM, scene.view(kind=BatchFeatureView)])
    same(read(store, [1])[0][0], [1.0] * DIM)
    fields = [Field(name="item_id", dtype=Int64), Field(name="embedding", dtype=Array(Float32), vector_length=8)]
    message = refused(Conflict, lambda: scene.store(name="third").apply([ITEM, scene.view(schema=fields)]))
    assert "'items'" in message, message
    assert "8 x float32" in message, message
    same(read(store, [1])[0][0], [1.0] * DIM)


def case_a_view_that_is_removed_loses_its_rows_and_comes_back_empty(scene: Scene) -> None:
    store = scene.store()
    source = scene.source()
    views = [view_of(source, name=name) for name in ("items", "others")]
    store.apply([ITEM, *views])
    for name in ("items", "others"):
        store.write_to_online_store(name, frame([1], [[1] * DIM], [NOW]))
    store.apply([ITEM, views[1]], objects_to_delete=[views[0]], partial=False)
    same(read(store, [1], feature="others:embedding")[0][0], [1.0] * DIM)
    online, config = store._get_provider().online_store, store.config
    assert "feast apply" in refused(NotFound, lambda: online.online_read(config, views[0], [entity_key(1)]))
    store.apply([ITEM, *views])
    same(read(store, [1]), [(None, "NOT_FOUND", None)])
    store.write_to_online_store("items", frame([1], [[2] * DIM], [NOW - timedelta(days=9)]))
    same(read(store, [1])[0][0], [2.0] * DIM)
    store.teardown()
    with scene.client() as client:
        serving = {name: model["active_version"] for name, model in client.status()["models"].items()}
    same([serving[f"{scene.project}-{name}"] for name in ("items", "others")], [None, None])
    store.teardown()


def case_a_model_that_no_view_made_is_neither_used_nor_dropped(scene: Scene) -> None:
    from tierstore import SnapshotWriter

    with SnapshotWriter(scene.folder / "trained", model=f"{scene.project}-items", version=1) as snapshot:
        snapshot.table("item", dim=DIM).write([1], np.ones((1, DIM)))
        snapshot.feature("item", table="item")
    store = scene.store()
    with scene.client() as client:
        client.load_snapshot(scene.folder / "trained")
        assert "'items'" in refused(Conflict, lambda: store.apply([ITEM, scene.view()]))
        online = store._get_provider().online_store
        refused(Conflict, lambda: online.teardown(store.config, [scene.view()], []))
        assert client.lookup(f"{scene.project}-items", "item", [1], return_found=True)[1].all()


def case_reads_of_more_than_one_request(scene: Scene) -> None:
    from tierstore.feast import steps

    store = scene.store()
    store.apply([ITEM, scene.view()])
    before, steps.REQUEST_KEYS = steps.REQUEST_KEYS, 7
    try:
        keys = list(range(40))
        store.write_to_online_store("items", frame(keys, [[key] * DIM for key in keys], [NOW] * 40))
        same([numbers for numbers, _, _ in read(store, keys)], [[float(key)] * DIM for key in keys])
    finally:
        steps.REQUEST_KEYS = before


def main(url: str, folder: str, *wanted: str) -> None:
    results: dict[str, str | None] = {}
    cases = {name: case for name, case in globals().items() if name.startswith("case_")}
    for number, (name, case) in enumerate(cases.items()):
        if wanted and name not in wanted:
            continue
        begun = time.monotonic()
        try:
            case(Scene(url, Path(folder) / name, f"p{number}"))
            results[name] = None
        except Exception:  # noqa: BLE001
            results[name] = traceback.format_exc()
        print(f"{name}: {time.monotonic() - begun:.1f} s", file=sys.stderr)
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
