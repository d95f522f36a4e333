"""An exception between any two lines of a delta or a switch (Ctrl-C, no memory): it was done or never begun, at once and after a start."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.engine.serving.test_undo import assert_equal, content, delta, undone
from tierstore.engine.deltas import apply, log
from tierstore.engine.lifecycle import routes
from tierstore.engine.serving import live, publisher, state_file
from tierstore.errors import Conflict

pytestmark = pytest.mark.usefixtures("quick_loads")

OpenStore = Callable[..., tierstore.Store]


class CutOff(BaseException):
    """What comes in between."""


class Before:
    """Raises `CutOff` before the n-th line that the block runs in some modules; `ended` if there are not so many.

    Not before the heads of `with` and `try`: no interpreter interrupts there, and nothing would be cleaned up. From Python 3.12 on
    the same goes for comprehensions, which are inlined: what is raised at their second line event leaves a lock of a `with` held.
    """

    def __init__(self, n: int, *modules: ModuleType) -> None:
        self._left, self.ended = n, True
        self._heads = {str(module.__file__): self._heads_in(str(module.__file__)) for module in modules}

    @staticmethod
    @functools.cache
    def _heads_in(path: str) -> set[int]:
        heads: set[int] = set()
        for node in ast.walk(ast.parse(Path(path).read_text())):
            if isinstance(node, (ast.With, ast.Try)):
                heads.update(range(node.lineno, node.body[0].lineno))
            elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp)) and sys.version_info >= (3, 12):
                heads.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return heads

    def __enter__(self) -> Before:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if frame.f_code.co_filename in self._heads else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and frame.f_lineno not in self._heads[frame.f_code.co_filename]:
            self._left -= 1
            if self._left < 0:
                self.ended = False
                sys.settrace(None)
                raise CutOff(f"{frame.f_code.co_name}, line {frame.f_lineno}")
        return self._line


def test_a_delta_that_was_cut_off_is_there_whole_or_can_be_sent_again(tmp_path, open_store):
    options = {"fold_grace_s": 60.0, "overlay_budget": "64MiB"}
    store = open_store(**options)
    store.load_snapshot(scenes.write_snapshot(tmp_path, rows={"user": 30, "item": 50}))
    seq, logged, shown = 0, 0, 0
    for n in range(1000):
        seq += 1
        sent = scenes.delta(seq, {"item": ([1, 1000 + seq], scenes.vectors("item", seq, [1, 1000 + seq]))})
        try:
            with Before(n, apply, log, publisher) as cut:
                store.apply_delta(sent)
        except CutOff as error:
            where = str(error)
            row, found = store.model("ctr").lookup("item_id", [1, 1000 + seq], return_found=True)
            held = store.status()["models"]["ctr"]["log"]["last"] == seq
            assert found[1] == held, f"{where}: what is logged is what serves"
            logged += held
            if n % 2 and not held:  # another one takes its place
                sent = scenes.delta(seq, {"item": ([1, 1000 + seq], scenes.vectors("item", -seq, [1, 1000 + seq]))})
            assert store.apply_delta(sent).applied is not held, where
            shown += 1
        wanted = scenes.vectors("item", seq if cut.ended or held or n % 2 == 0 else -seq, [1, 1000 + seq])
        row, found = store.model("ctr").lookup("item_id", [1, 1000 + seq], return_found=True)
        assert found.all()
        np.testing.assert_array_equal(row, wanted)
        if cut.ended:
            break
    assert cut.ended
    assert logged > 10
    assert shown - logged > 10
    # of bytes that are counted between two lines those of a delta or two may stay counted
    surplus = store.shared.overlay_budget.used - store.model("ctr").state.live.current.overlay_bytes
    assert 0 <= surplus < 1000
    before = content(store)
    store.close()
    store = open_store(**options)
    assert_equal(content(store), before)
    assert store.verify().ok
    _, found = store.model("ctr").lookup("item_id", np.arange(1001, 1001 + seq), return_found=True)
    assert found.all()


def test_what_could_not_be_shown_at_once_is_shown_before_the_next(tmp_path, open_store, monkeypatch):
    store = open_store(fold_grace_s=60.0)
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    store.apply_delta(delta(1))
    second = delta(2)
    live = store.model("ctr").state.live

    def no_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(live.publisher, "publish", no_memory)
        with pytest.raises(MemoryError):
            store.apply_delta(second)
        with pytest.raises(MemoryError):
            store.apply_delta(second)
    assert not store.apply_delta(second).applied
    rows, found = store.model("ctr").lookup("item_id", [2, 7002], return_found=True)
    assert found.all()
    np.testing.assert_array_equal(rows, scenes.vectors("item", 2, [2, 7002]))
    assert store.apply_delta(delta(3)).applied
    assert store.shared.overlay_budget.used == live.current.overlay_bytes
    before = content(store)
    store.close()
    assert_equal(content(open_store()), before)


@pytest.mark.thorough
@pytest.mark.parametrize("verb", ["activate", "rollback to a delta", "withdraw"])
def test_a_switch_that_was_cut_off_was_done_or_never_begun(tmp_path, open_store, verb):
    options = {"fold_grace_s": 60.0, "keep_versions": 9}
    store = open_store(**options)
    for version in (1, 2):
        rows = {"user": 30, "item": 50}
        where = scenes.write_snapshot(tmp_path, version, stamp=version, rows=rows)
        store.load_snapshot(where, activate=version == 1)
    for seq in (1, 2):
        store.apply_delta(delta(seq))

    def state() -> tuple[object, ...]:
        model = store.model("ctr")
        return model.active_version, str(undone(store)), model.served.versions

    def switch() -> None:
        if verb == "activate":
            store.activate("ctr", 2)
        elif verb == "withdraw":
            store.withdraw("ctr")
        else:
            store.rollback("ctr", to_seq=1)

    def back() -> None:
        if verb == "activate":
            store.activate("ctr", 1)
        elif verb == "withdraw":
            store.canary("ctr", 2, 0.5)
        else:
            store.rollback("ctr", to_seq=2)

    back()
    switch()
    done, after = state(), content(store)
    back()
    begun, before = state(), content(store)
    ways = set()
    step = 3 if verb == "rollback to a delta" else 1  # which builds the version again each time
    for n in range(0, 300, step):
        try:
            with Before(n, routes, state_file, live) as cut:
                switch()
        except CutOff:
            pass
        assert state() in (done, begun), n
        assert_equal(content(store), after if state() == done else before)
        ways.add((cut.ended, state() == done))
        if n % (5 * step) == 0:
            was = state()
            store.close()
            store = open_store(**options)
            assert state() == was, n
            assert_equal(content(scenes.warmed(store)), after if state() == done else before)
        if cut.ended:
            break
        try:
            switch()
        except Conflict:
            assert verb == "withdraw"
        assert_equal(content(store), after)
        back()
    assert ways == {(True, True), (False, True), (False, False)}
    assert store.verify().ok
