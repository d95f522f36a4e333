"""Clients of NVIDIA HPS's Triton backend, unchanged: KEYS and NUMKEYS in, OUTPUT0 out, of a model that `import-hps` made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import xxhash
from tritonclient.utils import InferenceServerException

from tests.imports.test_hps import hps
from tests.service.callers import OIP, Caller, Refused, TritonGrpc, TritonHttp, over_all
from tests.service.conftest import GRPC, settings_for
from tests.service.scenes import write_snapshot
from tierstore.cli import main
from tierstore.engine.store import Store
from tierstore.imports.hps import read_ps_json
from tierstore.service.server import ServerThread

# names whose order is not that of the alphabet; the first table has 3 numbers a row and ones by default, the other 2 and zeros
WIDE, DEEP = "wide", "deep"


def wide(*keys: int) -> list[float]:
    return [value for key in keys for value in ([3 * key, 3 * key + 1, 3 * key + 2] if 0 <= key < 5 else [1, 1, 1])]


def deep(*keys: int) -> list[float]:
    return [value for key in keys for value in ([2 * key + 1, 2 * key + 2] if 0 <= key < 5 else [0, 0])]


def tierstore(*words: str) -> None:
    """Run the command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["tierstore", *words])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code


def of_hashed_ids(root: Path) -> Path:
    """A `tables.toml` of the folders that `hps` has written, whose features hash ids."""
    lines = ['model = "hashed"']
    for number, (name, how) in enumerate({WIDE: "{ mod = 5, seed = 9 }", DEEP: "{ mod = 4 }"}.items()):
        lines += [
            f"[tables.{name}]",
            f'path = "model/wdl/1/wdl{number}_sparse_2000.model"',
            f"features.{name}.hash = {how}",
        ]
    (root / "tables.toml").write_text("\n".join(lines))
    return root / "tables.toml"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """The model `wdl` as HPS has it, imported by its `ps.json`; `hashed`, of the same folders; and `ctr`, with a table of string keys."""
    root = tmp_path_factory.mktemp("hps")
    file = hps(root, embedding_table_names=[WIDE, DEEP])
    assert [table.name for table in read_ps_json(file)[0].tables] == [WIDE, DEEP]
    tierstore("import-hps", str(file), "--out", str(root / "wdl"))
    tierstore("import", str(of_hashed_ids(root)), "--out", str(root / "hashed"))
    with Store(settings_for(root, grpc_port=GRPC, max_response="64KiB")) as store:
        store.load_snapshot(root / "wdl")
        store.load_snapshot(root / "hashed")
        store.load_snapshot(write_snapshot(root))
        with ServerThread(store) as server:
            yield server


def inputs(keys: list[int], numbers: list[int]) -> dict[str, np.ndarray]:
    """As the sample notebook of HPS makes them: a batch of one."""
    return {"KEYS": np.array([keys], np.int64), "NUMKEYS": np.array([numbers], np.int32)}


def looked_up(caller: Caller, keys: list[int], numbers: list[int], **how: Any) -> list[float]:
    answer = caller.ask("wdl", inputs(keys, numbers), ["OUTPUT0"], **how)
    assert answer.keys() == {"OUTPUT0"}
    assert answer["OUTPUT0"].ndim == 1
    found: list[float] = answer["OUTPUT0"].tolist()
    return found


@over_all(callers=OIP)
def test_rows_of_one_table_after_those_of_the_other(caller: Caller) -> None:
    for keys, numbers, rows in (
        ([4, 99, 0, 3, -1], [3, 2], wide(4, 99, 0) + deep(3, -1)),  # again and again, as clients do
        ([4, 99, 0, 3, -1], [0, 5], deep(4, 99, 0, 3, -1)),
        ([4, 99, 0, 3, -1], [5, 0], wide(4, 99, 0, 3, -1)),
        ([], [0, 0], []),
    ):
        assert looked_up(caller, keys, numbers) == rows


@over_all(callers=OIP)
def test_no_outputs_and_inputs_in_any_order(caller: Caller) -> None:
    answer = caller.ask("wdl", dict([*inputs([1, 2, 3], [1, 2]).items()][::-1]))
    assert answer["OUTPUT0"].tolist() == wide(1) + deep(2, 3)


@over_all(callers=OIP)
def test_as_many_keys_as_a_batch_has(caller: Caller) -> None:
    keys = np.random.default_rng(7).integers(-2, 7, 6000).tolist()
    assert looked_up(caller, keys, [1000, 5000]) == wide(*keys[:1000]) + deep(*keys[1000:])
    with pytest.raises(Refused, match="takes 72000 bytes of rows, 65536 are allowed: split"):
        looked_up(caller, [1] * 6000, [6000, 0])


@over_all(callers=OIP)
def test_ids_are_hashed_where_the_features_say_so(caller: Caller) -> None:
    wide_ids, deep_ids = [17, -1, 1 << 62, 4], [4, -(1 << 63), 7]
    of_wide = [xxhash.xxh3_64_intdigest(key.to_bytes(8, "little", signed=True), 9) % 5 for key in wide_ids]
    of_deep = [key % 4 for key in deep_ids]
    assert len(set(of_wide)) > 1
    for _ in range(3):
        answer = caller.ask("hashed", inputs([*wide_ids, *deep_ids], [4, 3]))
        assert answer["OUTPUT0"].tolist() == wide(*of_wide) + deep(*of_deep)
        answer = caller.ask("hashed", {DEEP: np.array(deep_ids), WIDE: np.array(wide_ids)})
        assert answer[DEEP].ravel().tolist() == deep(*of_deep)
        assert answer[WIDE].ravel().tolist() == wide(*of_wide)


@over_all(callers=OIP)
def test_numbers_that_do_not_add_up(caller: Caller) -> None:
    for numbers, says in (
        ([1, 1], r"'NUMKEYS': expected how many of the 3 keys are of each table, wide, deep; got \[1, 1\]"),
        ([4, -1], r"'NUMKEYS': expected how many of the 3 keys .*got \[4, -1\]"),
        ([1, 1, 1], r"'NUMKEYS': expected a number a table, 2 for wide, deep; the shape is \[1, 3\]"),
        ([3], r"'NUMKEYS': expected a number a table, 2 for wide, deep; the shape is \[1, 1\]"),
    ):
        with pytest.raises(Refused, match=says):
            looked_up(caller, [1, 2, 3], numbers)


@pytest.mark.parametrize("kind", [TritonHttp, TritonGrpc])
def test_what_else_is_refused(server: ServerThread, kind: type[TritonHttp]) -> None:
    caller = kind(server)
    keys, numbers = (caller.tensor(*each) for each in inputs([1], [1, 0]).items())
    long = caller.tensor("NUMKEYS", np.array([[1, 0]], np.int64))
    half = caller.client.infer("wdl", [keys, numbers], outputs=[caller.wanted("OUTPUT0", dtype="FP16")])
    assert half.as_numpy("OUTPUT0").dtype == np.float16
    assert half.as_numpy("OUTPUT0").tolist() == wide(1)
    for model, given, outputs, says in (
        ("wdl", [keys, long], None, "input 'NUMKEYS': expected INT32, got INT64"),
        ("wdl", [long, numbers], None, "input 'NUMKEYS' is given twice"),
        ("wdl", [keys], None, "unknown input 'KEYS'"),
        ("wdl", [keys, numbers], [caller.wanted(WIDE)], "answered by the output 'OUTPUT0' alone, asked for .*wide"),
        ("wdl", [keys, numbers], [caller.wanted("OUTPUT0", combiner="sum")], "rows as they are"),
        ("wdl", [keys, numbers], [caller.wanted("OUTPUT0", dtype="FP64")], "dtype 'FP64' is not served"),
        ("ctr", [keys, numbers], None, "table 'user' has string keys"),
    ):
        with pytest.raises(InferenceServerException, match=says):
            caller.client.infer(model, given, outputs=outputs)
    caller.close()


def test_a_model_with_inputs_of_these_names_keeps_them(
    own: tuple[Store, ServerThread, httpx.Client], tmp_path: Path
) -> None:
    from tierstore import SnapshotWriter

    store, server, _ = own
    with SnapshotWriter(tmp_path / "s", model="named", version=1) as writer:
        writer.table("KEYS", dim=1).write(np.array([5]), np.array([[0.5]], np.float32))
        writer.feature("KEYS", table="KEYS")
        writer.feature("NUMKEYS", table="KEYS")
    store.load_snapshot(tmp_path / "s")
    caller = TritonHttp(server)
    answer = caller.ask("named", {"KEYS": np.array([5]), "NUMKEYS": np.array([6])})
    assert (answer["KEYS"].tolist(), answer["NUMKEYS"].tolist()) == ([[0.5]], [[0.0]])
    caller.close()
