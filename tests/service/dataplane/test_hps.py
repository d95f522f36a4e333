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
from tests.service.conftest import GRPC, settings_for
from tests.service.scenes import write_snapshot
from tests.service.wires import HttpWire, Wire
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


def inputs(wire: Wire, keys: list[int], numbers: list[int], *, binary: bool = True) -> list[Any]:
    """As the sample notebook of HPS makes them: a batch of one."""
    return [
        wire.tensor("KEYS", np.array([keys], np.int64), "INT64", binary=binary),
        wire.tensor("NUMKEYS", np.array([numbers], np.int32), "INT32", binary=binary),
    ]


@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("binary_in", [True, False])
def test_rows_of_one_table_after_those_of_the_other(wire: Wire, binary_in: bool, binary_out: bool) -> None:
    for keys, numbers, rows in (
        ([4, 99, 0, 3, -1], [3, 2], wide(4, 99, 0) + deep(3, -1)),  # again and again, as clients do
        ([4, 99, 0, 3, -1], [0, 5], deep(4, 99, 0, 3, -1)),
        ([4, 99, 0, 3, -1], [5, 0], wide(4, 99, 0, 3, -1)),
        ([], [0, 0], []),
    ):
        answer = wire.client.infer(
            "wdl",
            inputs(wire, keys, numbers, binary=binary_in),
            request_id="1",
            outputs=[wire.wanted("OUTPUT0", binary=binary_out)],
        )
        assert wire.answered(answer)[1:] == ("1", ["OUTPUT0"])
        assert answer.as_numpy("OUTPUT0").dtype == np.float32
        assert answer.as_numpy("OUTPUT0").tolist() == rows, "flat"


def test_no_outputs_and_inputs_in_any_order(wire: Wire) -> None:
    answer = wire.client.infer("wdl", inputs(wire, [1, 2, 3], [1, 2])[::-1])
    assert answer.as_numpy("OUTPUT0").tolist() == wide(1) + deep(2, 3)
    answer = wire.client.infer("wdl", inputs(wire, [1, 2], [1, 1]), outputs=[wire.wanted("OUTPUT0", dtype="FP16")])
    assert answer.as_numpy("OUTPUT0").dtype == np.float16
    assert answer.as_numpy("OUTPUT0").tolist() == wide(1) + deep(2)


def test_as_many_keys_as_a_batch_has(wire: Wire) -> None:
    keys = np.random.default_rng(7).integers(-2, 7, 6000).tolist()
    answer = wire.client.infer("wdl", inputs(wire, keys, [1000, 5000]))
    assert answer.as_numpy("OUTPUT0").tolist() == wide(*keys[:1000]) + deep(*keys[1000:])
    with pytest.raises(InferenceServerException, match="takes 72000 bytes of rows, 65536 are allowed: split"):
        wire.client.infer("wdl", inputs(wire, [1] * 6000, [6000, 0]))


def test_its_tables_answer_by_the_names_of_features_too(wire: Wire) -> None:
    given = [wire.tensor(DEEP, np.array([4, 9]), "INT64"), wire.tensor(WIDE, np.array([1]), "INT64")]
    answer = wire.client.infer("wdl", given)
    assert answer.as_numpy(DEEP).tolist() == [deep(4), deep(9)]
    assert answer.as_numpy(WIDE).tolist() == [wide(1)]


def test_ids_are_hashed_where_the_features_say_so(wire: Wire) -> None:
    wide_ids, deep_ids = [17, -1, 1 << 62, 4], [4, -(1 << 63), 7]
    of_wide = [xxhash.xxh3_64_intdigest(key.to_bytes(8, "little", signed=True), 9) % 5 for key in wide_ids]
    of_deep = [key % 4 for key in deep_ids]
    assert len(set(of_wide)) > 1
    for _ in range(3):
        answer = wire.client.infer("hashed", inputs(wire, [*wide_ids, *deep_ids], [4, 3]))
        assert answer.as_numpy("OUTPUT0").tolist() == wide(*of_wide) + deep(*of_deep)
        given = [wire.tensor(DEEP, np.array(deep_ids), "INT64"), wire.tensor(WIDE, np.array(wide_ids), "INT64")]
        answer = wire.client.infer("hashed", given)
        assert answer.as_numpy(DEEP).ravel().tolist() == deep(*of_deep)
        assert answer.as_numpy(WIDE).ravel().tolist() == wide(*of_wide)


@pytest.mark.parametrize(
    ("keys", "numbers", "says"),
    [
        ([1, 2, 3], [1, 1], r"'NUMKEYS': expected how many of the 3 keys are of each table, wide, deep; got \[1, 1\]"),
        ([1, 2, 3], [4, -1], r"'NUMKEYS': expected how many of the 3 keys .*got \[4, -1\]"),
        ([1, 2, 3], [1, 1, 1], r"'NUMKEYS': expected a number a table, 2 for wide, deep; the shape is \[1, 3\]"),
        ([1, 2, 3], [3], r"'NUMKEYS': expected a number a table, 2 for wide, deep; the shape is \[1, 1\]"),
    ],
)
def test_numbers_that_do_not_add_up(wire: Wire, keys: list[int], numbers: list[int], says: str) -> None:
    with pytest.raises(InferenceServerException, match=says):
        wire.client.infer("wdl", inputs(wire, keys, numbers))


def test_what_else_is_refused(wire: Wire) -> None:
    keys, numbers = inputs(wire, [1], [1, 0])
    long = wire.tensor("NUMKEYS", np.array([[1, 0]], np.int64), "INT64")
    for model, given, outputs, says in (
        ("wdl", [keys, long], None, "input 'NUMKEYS': expected INT32, got INT64"),
        ("wdl", [long, numbers], None, "input 'NUMKEYS' is given twice"),
        ("wdl", [keys], None, "unknown input 'KEYS'"),
        ("wdl", [keys, numbers], [wire.wanted(WIDE)], "answered by the output 'OUTPUT0' alone, asked for .*wide"),
        ("wdl", [keys, numbers], [wire.wanted("OUTPUT0", combiner="sum")], "rows as they are"),
        ("wdl", [keys, numbers], [wire.wanted("OUTPUT0", dtype="FP64")], "dtype 'FP64' is not served"),
        ("ctr", [keys, numbers], None, "table 'user' has string keys"),
    ):
        with pytest.raises(InferenceServerException, match=says):
            wire.client.infer(model, given, outputs=outputs)


def test_plain_json(server: ServerThread) -> None:
    given = [
        {"name": "KEYS", "datatype": "INT64", "shape": [1, 3], "data": [[0, 1, 2]]},
        {"name": "NUMKEYS", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]},
    ]
    answer = httpx.post(f"{server.url}/v2/models/wdl/infer", json={"inputs": given})
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"] == [
        {"name": "OUTPUT0", "datatype": "FP32", "shape": [7], "data": wide(0) + deep(1, 2)}
    ]


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
    wire = HttpWire(server)
    given = [wire.tensor("KEYS", np.array([5]), "INT64"), wire.tensor("NUMKEYS", np.array([6]), "INT64")]
    answer = wire.client.infer("named", given)
    assert (answer.as_numpy("KEYS").tolist(), answer.as_numpy("NUMKEYS").tolist()) == ([[0.5]], [[0.0]])
    wire.client.close()
