"""String keys that share a hash, asked by unchanged clients: over HTTP, gRPC, and TensorFlow Serving's REST."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.engine.test_colliding import ALIKE, DIM, PLAIN, TAGS, WORDS, A, B, C, D, delta, snapshot
from tests.service.conftest import load
from tests.service.wires import GrpcWire, HttpWire, Wire
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread

WORD_KEYS = [A, B, "nobody", *ALIKE, PLAIN[3], B]
TAG_KEYS = [D, C, PLAIN[0], A]


def wanted(wire: Wire, feature: str, keys: list[str]) -> list[float | None]:
    """The first number of each row over the wire; None where it was not found."""
    array = np.array([key.encode() for key in keys], object)
    answer = wire.client.infer(
        "ctr",
        [wire.tensor(feature, array, "BYTES")],
        outputs=[wire.wanted(feature), wire.wanted(f"{feature}.found")],
    )
    rows, found = answer.as_numpy(feature), answer.as_numpy(f"{feature}.found")
    assert rows.shape == (len(keys), DIM[feature])
    return [float(row[0]) if there else None for row, there in zip(rows, found, strict=True)]


def as_json(http: httpx.Client, feature: str, keys: list[str]) -> list[float]:
    """The same as TensorFlow Serving's clients ask; the table's default where a key is not found."""
    answer = http.post("/v1/models/ctr:predict", json={"inputs": {feature: keys}})
    assert answer.status_code == 200, answer.text
    return [row[0] for row in answer.json()["outputs"]]


def test_both_keys_are_right_over_every_wire(own: tuple[Store, ServerThread, httpx.Client], tmp_path: Path) -> None:
    _, server, http = own
    assert load(http, snapshot(tmp_path))["state"] == "done"
    wires: list[Wire] = [HttpWire(server)]
    if server.grpc_target is not None:
        pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
        wires.append(GrpcWire(server))
    words, tags = dict(WORDS), dict(TAGS)
    changes: list[tuple[dict[str, float | None], dict[str, float | None]]] = [
        ({}, {}),
        ({A: 71.0, ALIKE[1]: None}, {D: 72.0}),
        ({A: None, B: 73.0, ALIKE[3]: 74.0}, {C: None, D: 75.0, A: 76.0, B: 77.0}),
    ]
    for seq, (more_words, more_tags) in enumerate(changes):
        if seq:
            answer = http.post("/admin/models/ctr/deltas", content=delta(seq, more_words, more_tags))
            assert answer.status_code == 200, answer.text
        words |= more_words  # type: ignore[arg-type]
        tags |= more_tags  # type: ignore[arg-type]
        for wire in wires:
            for _ in range(2):  # a request that is known is answered another way
                assert wanted(wire, "word", WORD_KEYS) == [words.get(key) for key in WORD_KEYS]
                assert wanted(wire, "tag", TAG_KEYS) == [tags.get(key) for key in TAG_KEYS]
        assert as_json(http, "word", WORD_KEYS) == [-1.0 if (v := words.get(key)) is None else v for key in WORD_KEYS]
    tables = http.get("/admin/models/ctr").json()["tables"]
    assert {name: entry["colliding_keys"] for name, entry in tables.items()} == {"word": 6, "tag": 4}
    for wire in wires:
        wire.client.close()
