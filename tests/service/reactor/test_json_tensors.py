"""Look-ups whose keys, or keys and rows, are in the JSON: reactors answer them with the same bytes as Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.service.conftest import eventually, settings_for
from tests.service.reactor.test_traffic import (
    DIM,
    ROWS,
    Answer,
    Served,
    ask,
    in_json,
    message,
    row_of,
    served,
    teach,
)
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread
from tierstore.wire.request_record import MOST_TENSORS

__all__ = ["served"]  # a fixture


def of_python(served: Served, sent: bytes, made: Any) -> Answer:
    """Python's answer to the same request, with a member that nobody reads and reactors do not skip."""
    head, _, body = sent.partition(b"\r\n\r\n")
    body = body[:-1] + b',"unread":[]}'
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length")]
    lines.append(b"Content-Length: %d" % len(body))
    return ask(served, made, b"\r\n".join(lines) + b"\r\n\r\n" + body, by_reactor=False)


@pytest.mark.parametrize("binary", [True, False], ids=["rows binary", "rows in JSON"])
def test_any_number_of_keys_in_json_is_answered_as_python_answers_it(served: Served, binary: bool) -> None:
    random = np.random.default_rng(1)
    outputs = ["item_id", "item_id.found"]
    teach(served, in_json({"item_id": np.arange(3)}, outputs, binary=binary))
    plans = len(served.server.service.plans)
    with served.connect() as made:
        for n in (0, 1, 2, 16, 64, 1024, 10_000, 20_000):  # of the last two readers write the rows as JSON
            keys = random.integers(0, ROWS + 100, n)
            for ident in ({}, {"id": 'a "b" c'}):
                sent = in_json({"item_id": keys}, outputs, binary=binary, **ident)
                answer = ask(served, made, sent)
                wanted = of_python(served, sent, made)
                assert (answer.document, answer.body) == (wanted.document, wanted.body)
                assert sorted(answer.head.lower().split(b"\r\n")[2:]) == sorted(wanted.head.lower().split(b"\r\n")[2:])
                np.testing.assert_array_equal(answer.outputs["item_id"].reshape(-1, DIM), row_of(keys))
    assert len(served.server.service.plans) == plans
    eventually(lambda: served.server.service.inflight.used_bytes == 0, "nothing is held")


def test_keys_in_json_have_the_plan_of_binary_ones(served: Served) -> None:
    outputs = ["clicked", "item_id.found"]
    inputs = {"clicked": np.arange(6), "item_id": np.arange(3)}
    teach(served, message(inputs, outputs))
    with served.connect() as made:
        answer = ask(served, made, in_json(inputs, outputs, binary=True))
        assert answer.body == ask(served, made, message(inputs, outputs)).body


def test_a_connection_ends_behind_an_answer_in_json(served: Served) -> None:
    teach(served, in_json({"item_id": np.arange(3)}, ["item_id"]))
    for n in (3, 20_000):
        with served.connect() as made:
            answer = ask(served, made, in_json({"item_id": np.arange(n)}, ["item_id"], "Connection: close"))
            assert b"\r\nconnection: close" in answer.head
            assert answer.outputs["item_id"].shape == (n, DIM)
            assert made.recv(1) == b""


FEATURES = 1000


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[Served]:
    """A model of many features."""
    with tierstore.SnapshotWriter(tmp_path / "wide", model="ctr", version=1) as writer:
        writer.table("item", dim=DIM, default=[0.25] * DIM).write(np.arange(1000), row_of(np.arange(1000)))
        for i in range(FEATURES):
            writer.feature(f"feature_{i}", table="item")
        writer.warmup("item", np.arange(1000))
    with Store(settings_for(tmp_path)) as store:
        store.load_snapshot(tmp_path / "wide")
        with ServerThread(store) as server:
            yield Served(store, server)


@pytest.mark.parametrize("sent_by", [message, in_json], ids=["binary", "JSON"])
def test_a_thousand_features_are_a_reactors(wide: Served, sent_by: Any) -> None:
    for count in (129, 300, FEATURES):
        inputs: dict[str, Any] = {f"feature_{i}": np.arange(i, i + 3) % 1100 for i in range(count)}
        outputs = [f"feature_{i}{part}" for i in range(count) for part in ("", ".found")][
            : min(2 * count, MOST_TENSORS)
        ]
        sent = sent_by(inputs, outputs)
        teach(wide, sent)
        with wide.connect() as made:
            answer = ask(wide, made, sent)
            assert list(answer.outputs) == outputs
            for i in (0, 64, 128):
                np.testing.assert_array_equal(answer.outputs[f"feature_{i}"], row_of(inputs[f"feature_{i}"]))
    assert json.loads(json.dumps(answer.document))["model_name"] == "ctr"
