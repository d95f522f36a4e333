"""What a type checker says of programs that use the package: their mistakes, and no more."""

from __future__ import annotations

import inspect
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tierstore
from tierstore import errors
from tierstore.client import Client, RemoteModel

ROOT = Path(__file__).parents[1]

PROGRAM = """
import time
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
import tierstore

Floats = npt.NDArray[np.floating[Any]]
Found = npt.NDArray[np.bool_]

with tierstore.SnapshotWriter("s", model="ctr", version=1) as snapshot:
    table: tierstore.TableWriter = snapshot.table("item", dim=2, key="string")
    table.write(["a"], np.ones((1, 2)))
    snapshot.dense(Path("model.onnx"))
with tierstore.DeltaWriter("1.arrow", model="ctr", seq=1, event_time=time.time()) as delta:
    delta.upsert("item", ["a"], [[1.0, 2.0]])
with tierstore.open("data", host_budget="1GiB") as store:
    version: int = store.load_snapshot("s")
    model = store.model("ctr")
    assert_type(model.lookup("item", ["a"]), Floats)
    assert_type(model.lookup("item", ["a"], return_found=True, dtype="float16"), tuple[Floats, Found])
    assert_type(store.apply_delta("1.arrow"), tierstore.DeltaResult)
with tierstore.Client("http://127.0.0.1:8000", timeout_s=1.0) as client:
    assert_type(client.lookup("ctr", "item", ["a"]), Floats)
    assert_type(client.lookup("ctr", "item", ["a"], return_found=True), tuple[Floats, Found])
    assert_type(client.model("ctr").lookup_many({"item": ["a"]}, return_found=True), dict[str, tuple[Floats, Found]])
    assert_type(client.predict("ctr", {"item": ["a"]}, outputs=["score"]), dict[str, npt.NDArray[Any]])
    flag = client.ready()
    assert_type(flag, bool)
    assert_type(client.lookup("ctr", "item", ["a"], return_found=flag), Floats | tuple[Floats, Found])
    assert_type(client.lookup_bags("ctr", "item", ["a"], [0], weights=[1.0], combiner="sum", version=3), Floats)
    client.lookup_bags("ctr", "item", ["a"], [0], weight=[1.0])  # E: misspelt
    assert_type(client.apply_delta(b""), tierstore.DeltaResult)
    try:
        client.lookup("ctr", "item", ["a"], timeout=1.0)  # E: misspelt
    except tierstore.Overloaded as error:
        assert_type(error.retry_after_s, float)


async def main() -> None:
    async with tierstore.AsyncClient("http://127.0.0.1:8000") as client:
        assert_type(await client.lookup("ctr", "item", ["a"]), Floats)
        assert_type(await client.model("ctr").lookup("item", ["a"], return_found=True), tuple[Floats, Found])
        assert_type(await client.model("ctr").ready, bool)
        client.lookup("ctr", "item", ["a"]) + 1  # E: not awaited
"""


def mypy(*programs: Path) -> list[str]:
    """Its lines, with the settings of `make types`, from whose cache it has the package itself."""
    command = [sys.executable, "-m", "mypy", *map(str, programs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    return (done.stdout + done.stderr).splitlines()


@pytest.mark.thorough
def test_a_program_is_checked_as_it_should_be(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    lines = mypy(tmp_path / "program.py")
    wrong = {int(line.split(":")[1]) for line in lines if ": error: " in line}
    expected = {i for i, line in enumerate(PROGRAM.splitlines(), 1) if "# E:" in line}
    assert wrong == expected, "\n".join(lines)


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "tierstore" / "py.typed").exists()
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"tierstore" = ["py.typed"]' in project


# --- the verbs of a client and of its models


def parameters(kind: type, name: str) -> dict[str, tuple[Any, Any]]:
    """Name → (default, annotation) of the parameters of a verb; none for a property."""
    verb = getattr(kind, name)
    found = {} if isinstance(verb, property) else inspect.signature(verb).parameters
    return {one.name: (one.default, one.annotation) for one in found.values()}


@pytest.mark.parametrize("name", ["lookup", "lookup_bags", "lookup_many", "predict"])
def test_a_verb_of_a_client_has_the_parameters_of_its_model_after_the_models_name(name: str) -> None:
    expected = {"self": parameters(RemoteModel, name)["self"], "model": (inspect.Parameter.empty, "str")}
    assert parameters(Client, name) == {**expected, **parameters(RemoteModel, name)}
    assert list(parameters(Client, name))[:2] == ["self", "model"]


def test_an_option_that_there_is_not_is_named_with_those_that_there_are() -> None:
    client = tierstore.Client("http://127.0.0.1:1")
    for call in (partial(client.lookup, "ctr"), client.model("ctr").lookup):
        with pytest.raises(
            TypeError, match="unknown option timeout: expected one of dtype, version, timeout_s, request_id"
        ):
            call("item", [1], timeout=1.0)  # type: ignore[call-overload]


def test_every_error_is_exported() -> None:
    tree = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.TierstoreError)
    }
    assert tree <= set(tierstore.__all__)
    for name in tierstore.__all__:
        assert getattr(tierstore, name) is not None
        assert name in dir(tierstore)
    with pytest.raises(AttributeError, match="has no attribute 'look_up'"):
        tierstore.look_up  # noqa: B018
