"""TensorFlow Serving's protocols: reactors answer them with the same bytes as Python, and limits hold for them too."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.engine.quick_build import in_process
from tests.predict import onnx_models as om
from tests.service.callers import predict_request
from tests.service.conftest import eventually, settings_for
from tests.service.reactor.prediction_scenes import (
    Drawn,
    OverPredict,
    OverRest,
    as_arrays,
    ask,
    idle,
    in_tfs_json,
    listed,
    one,
    seen,
    serving,
    warm,
)
from tests.service.reactor.test_traffic import DIM, ROWS, Answer, Served, row_of, write
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread

COUNT = int(os.environ.get("PREDICTIONS", 1200))


# --- predictions


def not_a_number() -> bytes:
    """The root of each row's sum, which is no number below 0."""
    nodes = [om.node("ReduceSum", "one axis", "sum", keepdims=1), om.node("Sqrt", "sum", "score")]
    inputs: om.Ports = {"one": (om.FLOAT, ["batch", 4])}
    return om.build(nodes, inputs, {"score": (om.FLOAT, ["batch", 1])}, {"axis": np.array([1])})


def test_scores_that_are_no_numbers_are_written_by_python_and_counted_once(tmp_path: Path) -> None:
    with serving(tmp_path, not_a_number()) as served:
        warm(served, OverRest, one(3))
        before = seen(served)
        asked = Drawn({"one": np.array([7, 1 << 40])}, ["score"])
        with tierstore.DeltaWriter(tmp_path / "negative", model="ctr", seq=1) as writer:
            writer.upsert("item", np.array([7]), np.full((1, 4), -1, np.float32))
        served.store.apply_delta((tmp_path / "negative").read_bytes())
        answer = ask(served, OverRest, asked)
        assert answer.whole.body == b'{"outputs": [[NaN], [1.0]]}'
        after = seen(served)
        assert after["ok"] - before["ok"] == after["predicted"] - before["predicted"] == 1
        idle(served)


# --- look-ups


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    """One store by two services: of the second the reactors learn nothing, and all answers are Python's."""
    root = tmp_path_factory.mktemp("two")
    with in_process(), Store(settings_for(root, host_budget="16MiB", max_response="16MiB")) as store:
        store.load_snapshot(write(root, 1, plain=True))
        with tierstore.SnapshotWriter(root / "solo", model="solo", version=1) as writer:
            writer.table("item", dim=DIM, default=[0.25] * DIM).write(np.arange(1000), row_of(np.arange(1000)))
            writer.feature("only", table="item", combiner="sum")
            writer.warmup("item", np.arange(1000))
        store.load_snapshot(root / "solo")
        store.model("ctr").lookup("item_id", np.arange(ROWS))
        with ServerThread(store) as first, ServerThread(store) as second:
            second.service.plans = None
            first.service.plans._may_learn = 1e9
            yield Served(store, first), Served(store, second)


def key(rng: random.Random) -> int:
    return rng.choice([rng.randrange(ROWS), rng.randrange(50), ROWS + 5, -1])


def in_rows(rng: random.Random) -> dict[str, Any]:
    """A request in the row form; some are wrong."""
    names = rng.sample(["item_id", "clicked", "word"], rng.randint(1, 3))
    kinds = {name: rng.choice(["scalar", "even", "bags"]) for name in names}
    widths = {name: rng.randint(0, 3) for name in names}

    def value(name: str) -> Any:
        one = (lambda: f"w{rng.randrange(220)}") if name == "word" else (lambda: key(rng))
        if kinds[name] == "scalar":
            return one()
        size = widths[name] if kinds[name] == "even" else rng.randint(0, 4)
        return [one() for _ in range(size)]

    return {"instances": [{name: value(name) for name in names} for _ in range(rng.randint(1, 9))]}


def in_columns(rng: random.Random) -> dict[str, Any]:
    """A request in the column form; some are wrong."""
    columns: dict[str, Any] = {}
    for name in rng.sample(["item_id", "clicked", "word"], rng.randint(1, 3)):
        shape = rng.choice([[rng.randint(0, 9)], [rng.randint(0, 4), rng.randint(0, 3)]])
        count = int(np.prod(shape))
        flat = [f"w{rng.randrange(220)}" if name == "word" else key(rng) for _ in range(count)]
        columns[name] = flat if len(shape) == 1 else [flat[k * shape[1] : (k + 1) * shape[1]] for k in range(shape[0])]
        if name == "clicked" and len(shape) == 1 and rng.random() < 0.6:
            starts = sorted(rng.randint(0, count) for _ in range(rng.randint(1, 4)))
            columns["clicked.offsets"] = [0, *starts]
            if rng.random() < 0.5:
                columns["clicked.weights"] = [rng.choice([1, 0.5, -2.25, 1e-3]) for _ in range(count)]
    if rng.random() < 0.1:
        columns[rng.choice(list(columns))] = rng.choice([[1.5], [None], 3, [True], ["x"], [[1], [2, 3]], []])
    return {"inputs": columns}


def asked_of(rng: random.Random) -> tuple[bytes, str]:
    """(a request, its path)."""
    if rng.random() < 0.25:
        values: Any = [[key(rng) for _ in range(rng.randint(0, 3))] for _ in range(rng.randint(1, 5))]
        if rng.random() < 0.4:
            values = [key(rng) for _ in range(rng.randint(1, 5))]
        return json.dumps({rng.choice(["instances", "inputs"]): values}).encode(), "/v1/models/solo:predict"
    document = in_rows(rng) if rng.random() < 0.6 else in_columns(rng)
    if rng.random() < 0.3:
        document["output_filter"] = rng.sample(
            ["item_id", "item_id.found", "clicked", "clicked.found", "word.found"], rng.randint(0, 3)
        )
    if rng.random() < 0.3:
        document["signature_name"] = rng.choice(["lookup", "serving_default", "", None, "lookup_float16", "other"])
    members = list(document.items())
    rng.shuffle(members)
    path = rng.choice(
        ["/v1/models/ctr" + of + ":predict" for of in ("", "/versions/1", "/versions/0", "/labels/stable")]
    )
    return json.dumps(dict(members)).encode(), path


def headed(answer: Answer) -> list[bytes]:
    return sorted(line for line in answer.head.lower().split(b"\r\n") if not line.startswith(b"date:"))


def test_reactors_and_python_answer_json_alike(two: tuple[Served, Served]) -> None:
    here, other = two
    rng, right = random.Random(5), 0
    before, python = here.by_reactors, other.by_reactors
    with here.connect() as mine, other.connect() as theirs:
        for _ in range(2 * COUNT):
            text, path = asked_of(rng)
            sent = in_tfs_json(text, path=path)
            mine.sendall(sent)
            theirs.sendall(sent)
            got, wanted = Answer(mine), Answer(theirs)
            assert (got.status, got.body) == (wanted.status, wanted.body), sent
            assert headed(got) == headed(wanted)
            right += got.status == 200
    assert right > COUNT // 2
    assert other.by_reactors == python
    assert here.by_reactors - before > right // 2
    eventually(lambda: here.server.service.inflight.used_bytes == 0, "nothing is held")


def test_a_request_of_no_version_as_openvino_names_it_is_learned(two: tuple[Served, Served]) -> None:
    """The client of OpenVINO's server says version 0 where it means none."""
    here, _ = two
    sent = in_tfs_json({"instances": [{"item_id": 1}]}, path="/v1/models/ctr/versions/0:predict")

    def answered_by_a_reactor() -> bool:
        before = here.by_reactors
        with here.connect() as client:
            client.sendall(sent)
            assert Answer(client).status == 200
        return here.by_reactors > before

    eventually(answered_by_a_reactor, "a reactor answers")


def test_reactors_and_python_answer_messages_alike(two: tuple[Served, Served]) -> None:
    here, other = two
    rng, right = random.Random(6), 0
    before, python = here.by_reactors, other.by_reactors
    with OverPredict(here) as mine, OverPredict(other) as theirs:
        for _ in range(COUNT):
            inputs: dict[str, Any] = {}
            for name in rng.choice([["item_id", "clicked", "word"], ["clicked"], ["word", "item_id"]]):
                count = rng.randint(0, 9)
                if name == "word":
                    inputs[name] = [b"w%d" % rng.randrange(220) for _ in range(count)]
                    continue
                dtype = rng.choice([np.int64, np.int64, np.int32])
                keys = np.array([abs(key(rng)) for _ in range(count)], dtype)
                inputs[name] = keys.reshape(-1, 1) if rng.random() < 0.3 else keys
                if name == "clicked" and inputs[name].ndim == 1 and rng.random() < 0.5:
                    inputs["clicked.offsets"] = np.array([0, *sorted(rng.randint(0, count) for _ in range(2))])
                    if rng.random() < 0.5:
                        inputs["clicked.weights"] = np.linspace(-1, 1, count).astype(np.float32)
            outputs = rng.choice([[], [], ["clicked.found", "clicked"], ["item_id"]])
            specs = [{}, {"version": {"value": 1}}, {"version_label": "stable"}, {"signature_name": "lookup_float16"}]
            spec = rng.choices(specs, [6, 1, 1, 1])[0]
            made = predict_request(as_arrays(inputs), outputs, content=rng.random() < 0.5, **spec)
            message = made.SerializeToString(deterministic=rng.random() < 0.5)
            mine.send(message)
            theirs.send(message)
            got, wanted = mine.answer(), theirs.answer()
            assert got.said == wanted.said, made
            right += got.code == "OK"
    assert right > COUNT // 2
    assert other.by_reactors == python
    assert here.by_reactors - before > right // 4  # there are many structures
    idle(here)


def test_any_number_of_keys_takes_one_plan(two: tuple[Served, Served]) -> None:
    here, other = two
    plans: list[int] = []
    with here.connect() as mine, other.connect() as theirs:
        for n in (3, 3, 1, 2, 64, 1000, 9000):  # of the last readers write the JSON
            keys = [number % ROWS for number in range(7, 7 + 3 * n, 3)]
            sent = in_tfs_json({"instances": [{"item_id": each, "clicked": [each, 1]} for each in keys]})
            before = here.by_reactors
            mine.sendall(sent)
            theirs.sendall(sent)
            got, wanted = Answer(mine), Answer(theirs)
            assert got.body == wanted.body
            plans.append(len(here.server.service.plans))
            assert here.by_reactors > before or len(plans) == 1
            rows = np.array([row["item_id"] for row in got.document["predictions"]], np.float32)
            np.testing.assert_array_equal(rows, row_of(np.array(keys)))
    assert len(set(plans)) == 1


def test_the_order_of_inputs_takes_no_further_plan(two: tuple[Served, Served]) -> None:
    here, _ = two
    inputs = {"item_id": np.arange(3), "clicked": np.arange(3), "word": [b"w1", b"w2", b"w3"]}
    with OverPredict(here) as calls, here.connect() as made:
        plans = []
        for names in (
            ["item_id", "clicked", "word"],
            ["item_id", "clicked", "word"],
            ["word", "item_id", "clicked"],
            ["clicked", "word", "item_id"],
        ):
            shuffled = {name: inputs[name] for name in names}
            calls.send(predict_request(as_arrays(shuffled), ["item_id"]).SerializeToString())
            assert calls.answer().code == "OK"
            made.sendall(
                in_tfs_json(
                    {"inputs": {name: listed(array) for name, array in shuffled.items()}, "output_filter": ["item_id"]}
                )
            )
            assert Answer(made).status == 200
            plans.append(len(here.server.service.plans))
        assert len(set(plans)) == 1
