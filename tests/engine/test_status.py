"""Status documents of real stores have the form that `tierstore/status.py` gives them: each key, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

import numpy as np

import tierstore
from tests.engine import scenes, ttl_scenes
from tests.service.upstream.scenes import Scene
from tierstore.engine.store import Store
from tierstore.status import StoreStatus, ThrottleStatus, Used


def wrong(value: object, form: Any, where: str) -> Iterator[str]:
    """What is not as `form` says, by its place in the document."""
    if is_typeddict(form):
        yield from wrong_keys(value, form, where)
    elif get_origin(form) is NotRequired:
        yield from wrong(value, *get_args(form), where)
    elif get_origin(form) in (Union, UnionType):
        if all(list(wrong(value, one, where)) for one in get_args(form)):
            yield f"{where}: {value!r} is none of {form}"
    elif get_origin(form) is Literal:
        if value not in get_args(form):
            yield f"{where}: {value!r} is none of {form}"
    elif get_origin(form) is dict and isinstance(value, dict):
        for key, one in value.items():
            yield from (
                wrong(one, get_args(form)[1], f"{where}.{key}") if isinstance(key, str) else (f"{where}: {key!r}",)
            )
    elif get_origin(form) is list and isinstance(value, list):
        for i, one in enumerate(value):
            yield from wrong(one, get_args(form)[0], f"{where}[{i}]")
    elif form is not Any and not (
        isinstance(value, get_origin(form) or form) and isinstance(value, bool) == (form is bool)
    ):
        yield f"{where}: {value!r} is no {form}"


def wrong_keys(value: object, form: Any, where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where}: {value!r} is no {form.__name__}"
        return
    hints = get_type_hints(form, include_extras=True)
    yield from (f"{where}.{key}: not in {form.__name__}" for key in value.keys() - hints.keys())
    for key, hint in hints.items():
        if key in value:
            yield from wrong(value[key], hint, f"{where}.{key}")
        elif get_origin(hint) is not NotRequired:
            yield f"{where}.{key}: missing"


def as_declared(store: Store) -> None:
    assert list(wrong(store.status(), StoreStatus, "status")) == []


def test_of_a_local_store(tmp_path: Path) -> None:
    with tierstore.open(tmp_path / "data", host_budget="4MiB", keep_versions=9, fold_grace_s=0.0) as store:
        as_declared(store)
        store.load_snapshot(ttl_scenes.write(tmp_path, 1))
        store.load_snapshot(ttl_scenes.write(tmp_path, 2), activate=False)
        as_declared(store)
        store.apply_delta(ttl_scenes.delta(1, range(9)))
        for _ in range(3):
            store.model("ctr").lookup("user", np.arange(400))
        scenes.housekeep(store)
        store.canary("ctr", 2, 0.5)
        as_declared(store)
        store.activate("ctr", 2)
        as_declared(store)


def test_of_a_node_whose_rows_are_in_a_cluster(open_node: Callable[..., Store], tmp_path: Path) -> None:
    store = open_node(ssd_cache="16MiB")
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1))
    store.apply_delta(scenes.stamped(1, {"item": range(9)}))
    assert store.status()["remote"]["reachable"]
    as_declared(store)


def test_of_a_front(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    try:
        scene.quarters()
        store = scene.front()
        scenes.eventually(lambda: store.status()["models"].get("ctr", {}).get("active_version") == 1, "it serves")
        as_declared(store)
    finally:
        scene.close()


def test_what_is_not_as_declared_is_named() -> None:
    assert list(wrong({"used": 1, "other": 2}, Used, "budget")) == [
        "budget.other: not in Used",
        "budget.total: missing",
    ]
    document = {"share": 1, "work": ["load", 7], "p99_s": "1", "quiet_p99_s": None, "p99_ratio": 1.3}
    assert [one.partition(":")[0] for one in wrong(document, ThrottleStatus, "t")] == [
        "t.share",
        "t.work[1]",
        "t.p99_s",
    ]
