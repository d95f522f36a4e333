"""Files that are not of the version whose name they have, after a restore by hand or a `mv`: they are named, and not served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine import scenes
from tests.engine.lifecycle.test_start import SMALL, item, loaded
from tests.engine.test_store import folded
from tierstore.engine.store import Store
from tierstore.errors import NotReady, TierstoreError
from tierstore.tiers.disk import changed_keys_file

pytestmark = pytest.mark.usefixtures("quick_loads")


def swap(one: Path, other: Path) -> None:
    beside = one.with_name("beside")
    one.rename(beside)
    other.rename(one)
    beside.rename(other)


@pytest.mark.parametrize("base", ["sealed", "rocksdb"])
def test_the_rows_of_another_version_are_not_served_under_this_one(
    open_store: Callable[..., Store], tmp_path: Path, base: str
) -> None:
    store = open_store(base=base, keep_versions=3)
    root = loaded(store, tmp_path, 1, 2, 3)
    store.close()
    swap(root / "1/db", root / "3/db")
    store = open_store(keep_versions=3)
    with pytest.raises(NotReady, match=r"3/db is not of the version in .*/3: expected version 3 .*, found version 1"):
        item(store, 1)
    problems = store.verify().problems
    assert any("1/db is not of the version" in problem for problem in problems), problems
    assert any("3/db is not of the version" in problem for problem in problems), problems
    with pytest.raises(TierstoreError, match="1/db is not of the version"):
        store.activate("ctr", 1)
    store.activate("ctr", 2)
    assert item(store, 1) == scenes.vector("item", 2, 1)[0]
    store.close()
    swap(root / "1/db", root / "3/db")
    store = open_store(keep_versions=3)
    store.activate("ctr", 3)
    assert item(store, 1) == scenes.vector("item", 3, 1)[0]
    assert store.verify().ok


def test_the_rows_of_another_model_are_not_served_under_this_one(
    open_store: Callable[..., Store], tmp_path: Path
) -> None:
    store = open_store()
    root, other = loaded(store, tmp_path, 1), loaded(store, tmp_path, 1, model="cvr")
    store.close()
    swap(root / "1/db", other / "1/db")
    store = open_store()
    for name, found in (("ctr", "cvr"), ("cvr", "ctr")):
        with pytest.raises(NotReady, match=f"found version 1 of '{found}'"):
            item(store, 1, name)
    store.close()
    swap(root / "1/db", other / "1/db")
    swap(root / "1", other / "1")
    store = open_store()
    for name, found in (("ctr", "cvr"), ("cvr", "ctr")):
        with pytest.raises(NotReady, match=f"is of version 1 of '{found}': expected version 1 of '{name}'"):
            item(store, 1, name)
        assert any(name in problem for problem in store.verify().problems)


def test_the_rows_of_an_earlier_load_under_the_same_number_are_not_served(
    open_store: Callable[..., Store], tmp_path: Path
) -> None:
    store = open_store()
    root = loaded(store, tmp_path, 2, 1)
    shutil.copytree(root / "2/db", tmp_path / "kept")
    store.drop("ctr", 2)
    shutil.rmtree(tmp_path / "ctr-2")
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, stamp=7, rows=SMALL))
    store.close()
    shutil.rmtree(root / "2/db")
    shutil.copytree(tmp_path / "kept", root / "2/db")
    with pytest.raises(NotReady, match="2/db is not of the version"):
        item(open_store(), 1)


def rolled_back(open_store: Callable[..., Store], root: Path) -> tuple[Store, Path]:
    """A store whose version 1 was built again without the delta 2, and whose first line is still there."""
    store = open_store()
    model = loaded(store, root, 1)
    for seq in (1, 2):
        store.apply_delta(scenes.stamped(seq, {"item": [seq]}))
    folded(store)
    shutil.copytree(model / "1", root / "first line")
    store.rollback("ctr", to_seq=1)
    for seq in (3, 4):
        store.apply_delta(scenes.stamped(seq, {"item": [seq]}))
    folded(store)
    store.close()
    return open_store(), model


def test_another_line_of_the_version_is_not_served_as_this_one(
    open_store: Callable[..., Store], tmp_path: Path
) -> None:
    store, model = rolled_back(open_store, tmp_path)
    assert item(store, 2) == scenes.vector("item", 1, 2)[0]
    assert store.verify().ok
    store.close()
    shutil.rmtree(model / "1.1/db")
    shutil.copytree(tmp_path / "first line/db", model / "1.1/db")
    with pytest.raises(NotReady, match=r"expected version 1 of 'ctr', line 1 .*, found version 1 of 'ctr' with"):
        item(open_store(), 2)


def test_changed_keys_of_another_line_hide_no_row_of_a_delta(open_store: Callable[..., Store], tmp_path: Path) -> None:
    store, model = rolled_back(open_store, tmp_path)
    store.close()
    longer = tmp_path / "first line/db" / changed_keys_file.NAME
    with longer.open("ab") as file:
        file.write(changed_keys_file.entry(9, {}))  # it got further than this line
    shutil.copy(longer, model / "1.1/db" / changed_keys_file.NAME)
    store = open_store()
    for key, seq in ((1, 1), (3, 3), (4, 4)):
        assert item(store, key) == scenes.vector("item", seq, key)[0]
    assert item(store, 2) == scenes.vector("item", 1, 2)[0]


def test_a_version_that_says_nothing_of_what_it_is_is_taken_as_it_is(
    open_store: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier releases have written them."""
    with monkeypatch.context() as patched:
        patched.setattr("tierstore.engine.versions.info.identity_record", lambda *_: {})
        store = open_store()
        root = loaded(store, tmp_path, 1, 2)
        store.close()
    for version in (1, 2):
        document = json.loads((root / f"{version}/version.json").read_text())
        assert len(document.pop("content")) == 32
        document.pop("xxh3")
        (root / f"{version}/version.json").write_text(json.dumps(document))
    store = open_store()
    for seq in (1, 2):
        store.apply_delta(scenes.stamped(seq, {"item": [seq]}))
    folded(store)
    store.rollback("ctr", to_seq=1)
    store.close()
    assert (root / "2.1/db" / changed_keys_file.NAME).read_bytes()[8] == 1
    store = open_store()
    assert item(store, 1) == scenes.vector("item", 1, 1)[0]
    assert item(store, 2) == scenes.vector("item", 2, 2)[0]
    store.activate("ctr", 1, force=True)
    assert store.verify().ok
