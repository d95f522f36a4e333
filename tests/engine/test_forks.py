"""A store in a child that its process forks: refused there, and untouched by it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import tierstore
from tests.engine import scenes
from tierstore.access.tokens import TokenFile
from tierstore.formats.one_writer import only_writer
from tierstore.ingest import build

pytestmark = pytest.mark.usefixtures("quick_loads")

CHILD_S = 20  # after which a child that hangs is ended

CALLS: dict[str, Callable[..., Any]] = {
    "model": lambda store, *_: store.model("ctr"),
    "models": lambda store, *_: store.models(),
    "status": lambda store, *_: store.status(),
    "delta": lambda store, ctr, view, where: store.apply_delta(scenes.stamped(1, {"item": [3]})),
    "load": lambda store, ctr, view, where: store.load_snapshot(where),
    "rollback": lambda store, *_: store.rollback("ctr"),
    "verify": lambda store, *_: store.verify(),
    "backup": lambda store, ctr, view, where: store.backup("ctr", where / "backup"),
    "look-up": lambda store, ctr, *_: ctr.lookup("item_id", [3]),
    "bags": lambda store, ctr, *_: ctr.lookup_bags("clicked", [3], [0]),
    "many": lambda store, ctr, *_: ctr.lookup_many({"item_id": [3]}),
    "view": lambda store, ctr, *_: ctr.view().__enter__(),
    "held view": lambda store, ctr, view, *_: view.lookup("item_id", [3]),
    "what serves": lambda store, ctr, *_: ctr.active_version,
}


def in_child(work: Callable[[], object]) -> tuple[int, str]:
    """The exit status of a forked child that does `work`, and what it has raised; -SIGALRM if it hangs."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(CHILD_S)
            work()
            os.write(write, b"returned")
        except BaseException as error:  # noqa: BLE001
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as told:
        said = told.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


@pytest.mark.parametrize("call", CALLS)
def test_every_call_in_a_forked_child_is_refused_and_names_spawn(store, tmp_path: Path, call: str) -> None:
    store.load_snapshot(scenes.write_snapshot(tmp_path, 7))
    ctr = store.model("ctr")
    with ctr.view() as view:
        status, said = in_child(lambda: CALLS[call](store, ctr, view, tmp_path))
    assert status == 0
    assert said.startswith("Closed: ")
    assert "spawn" in said
    assert (ctr.active_version, ctr.log.last) == (7, 0)


def test_a_forked_child_changes_nothing_and_the_parent_goes_on(store, tmp_path: Path) -> None:
    store.load_snapshot(scenes.write_snapshot(tmp_path, 7))

    def child() -> None:
        with store:  # as a program that ends in a `with` block
            pass
        store.close()

    assert in_child(child) == (0, "returned")
    assert in_child(lambda: in_child(store.models))[0] == 0  # of a child, too
    delta = scenes.stamped(1, {"item": [3]})
    assert store.apply_delta(delta).applied
    assert store.model("ctr").lookup("item_id", [3])[0, 0] == scenes.vector("item", 1, 3)[0]


def test_a_child_leaves_the_lock_to_its_parent_and_does_not_outlive_it_with_it(tmp_path: Path, open_store) -> None:
    """The child closes the store and lives on; a second store is refused while the parent has it, and no longer."""
    store = open_store()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(120)
            os.close(tell)
            store.close()
            os.read(told, 1)  # until the parent ends, or closes its end
        finally:
            os._exit(0)
    try:
        os.close(told)
        with pytest.raises(tierstore.Locked, match="in this process"):
            tierstore.open(tmp_path / "data")
        text = (tmp_path / "data" / "LOCK").read_text().split()
        assert text[0] == str(os.getpid())
        from_outside = "import sys, tierstore; tierstore.open(sys.argv[1]).close()"
        command = [sys.executable, "-c", from_outside, str(tmp_path / "data")]
        second = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert "open in another process" in second.stderr
        store.close()
        again = open_store()  # although the child lives
        again.close()
    finally:
        os.close(tell)
        assert os.waitpid(child, 0)[1] == 0


PLACES: dict[str, Callable[[Path], AbstractContextManager[object]]] = {
    "backup": lambda where: only_writer(where, "a backup"),
    "build": build._own,
    "tokens": lambda where: TokenFile(where / "tokens.json")._changing(),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_child_that_was_forked_by_a_writer_does_not_keep_its_place(tmp_path: Path, place: str) -> None:
    def write() -> None:
        with PLACES[place](tmp_path / "place"):
            pass

    told, tell = os.pipe()
    with PLACES[place](tmp_path / "place"):
        child = os.fork()
        if child == 0:
            os.close(tell)
            os.read(told, 1)  # until the test ends
            os._exit(0)
    try:
        assert in_child(write) == (0, "returned")
    finally:
        os.close(tell)
        os.waitpid(child, 0)
