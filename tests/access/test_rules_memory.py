"""What callers without a token can have the service keep: little, whatever they send."""

from __future__ import annotations

import gc
import tracemalloc

from tierstore.access.roles import Action
from tierstore.access.rules import is_listed, of_http


def test_long_paths_take_no_memory_for_good():
    for number in range(1024):  # what is kept of short ones is there
        of_http("GET", f"/v2/models/m{number}")
        is_listed(f"/v2/models/m{number}")
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(300):
            path = f"/v2/models/{number}{'x' * 60_000}"
            assert of_http("GET", path) == (of_http("GET", "/v2/models/m1")[0], path.rpartition("/")[2])
            assert is_listed(path)
            assert of_http("POST", f"/nothing/{number}" + "/y" * 30_000) == (Action.ADMIN, None)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1 << 20
