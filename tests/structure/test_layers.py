"""Imports inside `tierstore/` only look down, each driver has one door, and no module is dead.

The rules are read off the source with `ast`, so an import inside a function or under TYPE_CHECKING
counts as much as one at the top. A string that spells a module's dotted name counts as an import as
well: that is how modules are imported lazily or run as a helper process.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.structure.trees import tree_of
from tierstore.kernels import PARTS
from tierstore.kernels import modules as kernel_modules

ROOT = Path(__file__).parents[2]
PACKAGE = "tierstore"

# A unit is the first name below the package: a folder or a module.
FLOORS = {
    "addresses": 0,
    "arguments": 0,
    "errors": 0,
    "forks": 0,
    "phase_rate": 1,
    "sizes": 0,
    "verdicts": 0,
    "types": 0,
    "lazy": 0,
    "status": 0,
    "config": 0,
    "log_limits": 0,
    "machine": 0,
    "threads": 0,
    "logs": 0,
    "trace_context": 0,
    "kernels": 1,
    "wire": 1,
    "formats": 1,
    "http1": 1,
    "open_files": 1,
    "tiers": 2,
    "imports": 2,
    "access": 2,
    "kafka": 2,
    "torch": 2,
    "onnx": 2,
    "sizing": 3,
    "ingest": 3,
    "lookup": 3,
    "predict": 3,
    "engine": 4,
    "reactor": 4,
    "service": 5,
    "client": 6,
    "triton": 6,
    "feast": 6,
    "bench": 6,
    "cli": 6,
    "demo": 6,
    "__main__": 7,
    "__init__": 7,  # the face of the package: it may name everything, lazily
}
# Between units of one floor nothing is allowed but this.
SIDEWAYS = {
    ("types", "errors"),
    ("types", "lazy"),
    ("arguments", "errors"),
    ("arguments", "lazy"),
    ("arguments", "types"),
    ("config", "errors"),
    ("config", "types"),
    ("config", "logs"),
    ("config", "machine"),
    ("config", "sizes"),
    ("logs", "errors"),
    ("forks", "errors"),
    ("logs", "log_limits"),
    ("formats", "kernels"),
    ("wire", "kernels"),
    ("triton", "client"),
    ("feast", "client"),
    ("cli", "triton"),
    ("cli", "client"),
    ("cli", "demo"),
    ("cli", "bench"),
    ("bench", "client"),
    ("demo", "client"),
}
# A unit may be held further down than its floor: the client must work where no store is.
CEILING = {"client": 1}

# Inside a folder with rooms: the first name below the folder → its floor there. In one room imports are free.
ROOMS: dict[str, dict[str, int]] = {
    "engine": {
        "events": 0,
        "data": 1,
        "versions": 2,
        "reads": 3,
        "serving": 4,
        "deltas": 5,
        "placement": 6,
        "lifecycle": 7,
        "model": 8,
        "operations": 9,
        "placements": 10,
        "store": 11,
    },
    "engine.placements": {
        "refusals": 0,
        "following": 1,
        "local": 1,
        "cluster": 2,
        "upstream": 2,
        "choose": 3,
    },
    "wire": {
        "bytes_tensor": 0,
        "callers": 0,
        "request_record": 0,
        "tls_messages": 0,
        "http1": 1,
        "json": 1,
        "http2": 2,
        "protobuf": 2,
        "resp": 2,
    },
    "tiers": {
        "answers": 0,
        "base": 0,
        "background": 0,
        "checks": 0,
        "joining": 0,
        "connection_pools": 0,
        "host": 1,
        "disk": 1,
        "device": 2,
        "cluster": 1,
        "upstream": 1,
        "ssd": 2,
    },
    "formats": {
        "release": 0,
        "names": 0,
        "patience": 0,
        "buckets": 0,
        "ranges": 0,
        "scattered_digest": 0,
        "strings": 0,
        "key_arrays": 1,
        "times": 0,
        "colliding": 0,
        "managed_collisions": 0,
        "private": 0,
        "objects": 1,
        "regular": 2,
        "files": 3,
        "key_hash": 0,
        "keys": 3,
        "onnx_file": 3,
        "trainer_hash": 4,
        "columns": 4,
        "uploads": 4,
        "one_writer": 4,
        "normalize": 5,
        "row_times": 5,
        "rounding": 0,
        "delta": 6,
        "snapshot": 7,
        "backups": 8,
        "targets": 8,
    },
    "service": {
        "addresses": 0,
        "forwarded": 1,
        "access": 1,
        "error_status": 0,
        "families": 0,
        "openssl": 0,
        "process": 0,
        "stats": 0,
        "history": 1,
        "tls": 1,
        "limits": 1,
        "traces": 1,
        "spool": 1,
        "request_log": 2,
        "dataplane": 2,
        "protocols": 3,
        "reactor": 4,
        "context": 5,
        "exchange": 6,
        "http": 7,
        "rpc": 7,
        "admin": 8,
        "sources": 8,
        "root": 9,
        "renewal": 9,
        "server": 10,
        "application": 11,
    },
    "client": {
        "environment": 0,
        "settings": 0,
        "identify": 0,
        "upload": 0,
        "wire": 0,
        "balancing": 1,
        "connecting": 1,
        "unreachable": 1,
        "replies": 1,
        "inputs": 1,
        "aio_connecting": 2,
        "attempts": 2,
        "splitting": 2,
        "connections": 3,
        "inference": 3,
        "transport": 4,
        "async_transport": 5,
        "operations": 5,
        "base": 6,
        "aio_models": 6,
        "sync_models": 6,
        "sync": 7,
        "aio": 7,
        "replicas": 8,
        "whole": 9,
        "rollout": 9,
    },
}

# driver → the modules and folders that may import it
DOORS: dict[str, set[str]] = {
    "obstore": {"formats.buckets"},
    "boto3": {"formats.buckets"},
    "confluent_kafka": {"kafka"},
    "fastavro": {"kafka.row_formats"},
    "rocksdict": {"tiers.disk.database", "tiers.disk.rocks", "tiers.disk.sst"},
    "redis": {"tiers.cluster"},
    "cupy": {"tiers.device.cupy_device"},
    "numba": {*PARTS, "demo"},  # the demo trains a model, which is no part of the store
    "llvmlite": {"kernels", "tiers.device.driver_calls"},
    "onnxruntime": {"predict", "torch"},
    "onnx": {"predict", "demo", "formats.onnx_file", "onnx"},
    "fastapi": {"service"},
    "starlette": {"service"},
    "uvicorn": {"service.http.asgi"},
    "uvloop": {"service.server"},
    "prometheus_client": {"service"},
    "pydantic_settings": {"config"},
    "typer": {"cli"},
    "click": {"cli"},
    "rich": {"cli", "demo"},
    "torch": {"torch", "imports.torch_tensors"},
    "onnxscript": {"torch"},
    "feast": {"feast"},
    "h5py": {"imports.keras_weights"},
    "deltalake": {"imports.lake_tables"},
    "pyiceberg": {"imports.lake_tables"},
    "httpx": set(),  # tests and benchmarks ask with it; the client has a transport of its own
    "grpc": {"service.rpc"},
    "google": {"service.rpc", "kafka.row_formats"},
}


def edge_problem(importer: str, imported: str) -> str | None:
    """Why module `importer` may not import module `imported` (dotted names below the package), or None."""
    source, target = importer.split(".")[0], imported.split(".")[0]
    if target == "__init__":
        return None  # below `tierstore/__init__.py` only `__version__` is taken from it, see `imports_of`
    if source == target:
        return room_problem(importer, imported)
    here, there = FLOORS[source], FLOORS[target]
    if there > CEILING.get(source, here):
        return f"{importer} (floor {here}) imports {imported} (floor {there})"
    if there == here and (source, target) not in SIDEWAYS:
        return f"{importer} imports {imported}, which is another folder of the same floor"
    return None


def room_problem(importer: str, imported: str) -> str | None:
    """The same for two modules of one folder, or of a room of it that has rooms of its own."""
    source, target = importer.split("."), imported.split(".")
    for depth in range(1, min(len(source), len(target))):
        if source[:depth] != target[:depth]:
            return None
        rooms = ROOMS.get(".".join(source[:depth]))
        if rooms is not None and source[depth] != target[depth]:
            here, there = rooms[source[depth]], rooms[target[depth]]
            return f"{importer} (room {here}) imports {imported} (room {there})" if there >= here else None
    return None


def door_problem(importer: str, driver: str) -> str | None:
    """Why module `importer` may not import the third-party package `driver`, or None."""
    doors = DOORS.get(driver)
    if doors is None or any(importer == door or importer.startswith(door + ".") for door in doors):
        return None
    return f"{importer} imports {driver}, which only {', '.join(sorted(doors))} may"


def imports_of(tree: ast.AST, package: str, known: frozenset[str]) -> tuple[set[str], set[str]]:
    """(modules of ours, top-level names of others') that `tree` imports; `package` is the folder it lies in."""
    ours: set[str] = set()
    others: set[str] = set()

    def note(dotted: str, names: list[str]) -> None:
        if dotted.split(".")[0] != PACKAGE:
            others.add(dotted.split(".")[0])
            return
        inside = dotted.removeprefix(PACKAGE).removeprefix(".")
        for name in names or [""]:
            deeper = ".".join(part for part in (inside, name) if part)
            if deeper in known:
                ours.add(deeper)  # `from tierstore.tiers import disk` imports a module
            elif inside in known:
                ours.add(inside)
            elif not inside:
                # `from tierstore import …` inside the package: lazily exported names would hide an import upwards.
                assert name in {"__version__", ""}, f"inside the package import {name} from its own module"
                ours.add("__init__")

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                note(alias.name, [])
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            note(".".join([*base, *([node.module] if node.module else [])]), [alias.name for alias in node.names])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(PACKAGE + "."):
            name = node.value.removeprefix(PACKAGE + ".").split(":")[0]
            if name in known:
                ours.add(name)
    return ours, others


def modules() -> Iterator[tuple[str, Path]]:
    """(dotted name below the package, file); a folder's `__init__.py` goes by the folder's name."""
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts), path


@cache
def graph() -> dict[str, tuple[set[str], set[str]]]:
    files = dict(modules())
    known = frozenset(files) - {"__init__"}
    result = {}
    for name, path in files.items():
        package = ".".join((PACKAGE, *path.relative_to(ROOT / PACKAGE).parts[:-1]))
        result[name] = imports_of(tree_of(path), package, known)
    return result


def test_every_module_has_a_floor() -> None:
    assert {name.split(".")[0] for name in graph()} <= FLOORS.keys()


def test_every_room_has_a_floor() -> None:
    for folder, rooms in ROOMS.items():
        inside = {name.removeprefix(folder + ".").split(".")[0] for name in graph() if name.startswith(folder + ".")}
        assert inside == rooms.keys(), folder


def test_imports_only_look_down() -> None:
    problems = (edge_problem(name, target) for name, (ours, _) in graph().items() for target in sorted(ours))
    assert [problem for problem in problems if problem] == []


def test_what_a_kernel_inlines_is_among_the_kernels() -> None:
    """Else an edit of it would leave what is compiled as it was."""
    kernels = {name.removeprefix(f"{PACKAGE}.") for name in kernel_modules()}
    assert kernels <= graph().keys()
    assert {
        name: found
        for name in kernels
        if (found := {one for one in graph()[name][0] - kernels if FLOORS[one.split(".")[0]] > 0})
    } == {}


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Modules of which each is imported by the next, the first and the last the same; none where no import goes round."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_import_goes_round() -> None:
    """Not for the sake of types either: who needs a type from above says with a Protocol what it needs."""
    # a module that runs itself as a process names itself; of the face of the package only `__version__` is taken
    assert circle({name: ours - {"__init__", name} for name, (ours, _) in graph().items()}) == []


def test_an_import_that_goes_round_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}


def test_each_driver_has_one_door() -> None:
    problems = (door_problem(name, driver) for name, (_, others) in graph().items() for driver in sorted(others))
    assert [problem for problem in problems if problem] == []


def test_no_module_is_dead() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    entries = {"__main__", "__init__", "torch", "onnx", "triton", "feast"} | {
        target.split(":")[0].removeprefix(PACKAGE + ".") for target in scripts.values()
    }
    reached: set[str] = set()
    ahead = sorted(entries)
    while ahead:
        name = ahead.pop()
        if name in graph() and name not in reached:
            reached.add(name)
            ahead += [*graph()[name][0], name.rpartition(".")[0]]  # importing a module runs its folder's too
    folders = {name for name, path in modules() if path.name == "__init__.py"}
    assert sorted(graph().keys() - reached - folders) == []


def test_every_dependency_is_imported_or_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs/decisions/dependencies.md").read_text(encoding="utf-8")
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0] for group in groups for requirement in group}
    assert sorted(name for name in names if f"`{name}" not in page) == []
    modules_of = {
        "prometheus-client": "prometheus_client",
        "pydantic-settings": "pydantic_settings",
        "protobuf": "google",
    }
    imported = {name for _, others in graph().values() for name in others}
    needed = {requirement.split("[")[0].split(">")[0] for requirement in project["dependencies"]}
    assert sorted(name for name in needed if modules_of.get(name, name) not in imported) == []


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("engine.store", "tiers.disk", True),
        ("tiers.host", "tiers.background", True),
        ("tiers.host", "tiers.disk", False),
        ("formats.keys", "kernels.xxh3", True),
        ("wire.http2.head", "wire.http1.head", True),
        ("wire.http1.head", "wire.http2.head", False),
        ("kernels.codec", "wire.resp", False),
        ("kernels.xxh3", "formats.keys", False),
        ("kernels.codec", "types", True),
        ("kernels.codec", "tiers.host", False),
        ("types", "errors", True),
        ("errors", "types", False),
        ("engine.store", "engine.data.overlay", True),
        ("engine.data.overlay", "engine.data.cascade", True),
        ("engine.data.overlay", "engine.store", False),
        ("engine.reads.view", "engine.serving.routing", False),
        ("engine.placements.cluster.model", "engine.placements.following.follower", True),
        ("engine.placements.cluster.model", "engine.placements.upstream.model", False),
        ("engine.placements.following.rows", "engine.placements.cluster.model", False),
        ("engine.placements.local.rows", "engine.model", True),
        ("engine.model", "engine.placements.local.rows", False),
        ("engine.store", "service.application", False),
        ("client", "errors", True),
        ("client", "engine.store", False),
        ("client", "tiers.host", False),
        ("client", "formats.delta", True),
        ("cli.app", "client", True),
        ("client", "cli.app", False),
        ("service.application", "client", False),
    ],
)
def test_the_rule_of_floors(importer: str, imported: str, allowed: bool) -> None:
    assert (edge_problem(importer, imported) is None) is allowed


@pytest.mark.parametrize(
    ("importer", "driver", "allowed"),
    [
        ("tiers.disk.rocks", "rocksdict", True),
        ("tiers.disk.rocksy", "rocksdict", False),
        ("engine.store", "rocksdict", False),
        ("kernels.pool", "numba", True),
        ("tiers.host", "numba", False),
        ("tiers.host", "numpy", True),
    ],
)
def test_the_rule_of_doors(importer: str, driver: str, allowed: bool) -> None:
    assert (door_problem(importer, driver) is None) is allowed


@pytest.mark.parametrize(
    ("source", "ours"),
    [
        ("import tierstore.tiers.disk", {"tiers.disk"}),
        ("from tierstore.tiers import disk", {"tiers.disk"}),
        ("from tierstore.tiers.disk import DiskTier", {"tiers.disk"}),
        ("from . import disk", {"engine.disk"}),
        ("from ..tiers import disk", {"tiers.disk"}),
        ("from .disk import DiskTier", {"engine.disk"}),
        ("def f():\n    from tierstore.tiers.disk import DiskTier", {"tiers.disk"}),
        ("run(['-m', 'tierstore.tiers.disk'])", {"tiers.disk"}),
        ("EXPORTS = {'open': 'tierstore.tiers.disk:open'}", {"tiers.disk"}),
        ("from tierstore import __version__", {"__init__"}),
        ("import os", set()),
    ],
)
def test_every_way_to_import_is_seen(source: str, ours: set[str]) -> None:
    known = frozenset({"tiers", "tiers.disk", "engine", "engine.disk"})
    assert imports_of(ast.parse(source), "tierstore.engine", known)[0] == ours


def test_a_lazily_exported_name_may_not_be_used_inside() -> None:
    with pytest.raises(AssertionError, match="from its own module"):
        imports_of(ast.parse("from tierstore import open"), "tierstore.engine", frozenset())
