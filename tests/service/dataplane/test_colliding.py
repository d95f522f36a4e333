"""String keys that share a hash, over every protocol."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np

from tests.engine.test_colliding import ALIKE, DIM, PLAIN, TAGS, WORDS, A, B, C, D, delta, snapshot
from tests.service.callers import CALLERS, Caller
from tests.service.conftest import load
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread

WORD_KEYS = [A, B, "nobody", *ALIKE, PLAIN[3], B]
TAG_KEYS = [D, C, PLAIN[0], A]


def held(caller: Caller, feature: str, keys: list[str]) -> list[float | None]:
    """The first number of each row; None where it was not found."""
    answer = caller.ask("ctr", {feature: np.array(keys, object)}, [feature, f"{feature}.found"])
    rows, found = answer[feature], answer[f"{feature}.found"]
    assert rows.shape == (len(keys), DIM[feature])
    return [float(row[0]) if there else None for row, there in zip(rows, found, strict=True)]


def test_both_keys_are_right_over_every_protocol(own: tuple[Store, ServerThread, httpx.Client], tmp_path: Path) -> None:
    _, server, http = own
    assert load(http, snapshot(tmp_path))["state"] == "done"
    callers = [kind(server) for kind in CALLERS]
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
        for caller in callers:
            for _ in range(2):  # a request that is known is answered another way
                assert held(caller, "word", WORD_KEYS) == [words.get(key) for key in WORD_KEYS]
                assert held(caller, "tag", TAG_KEYS) == [tags.get(key) for key in TAG_KEYS]
    tables = http.get("/admin/models/ctr").json()["tables"]
    assert {name: entry["colliding_keys"] for name, entry in tables.items()} == {"word": 6, "tag": 4}
    for caller in callers:
        caller.close()
