"""The admin interface against its own description: no request that fits the OpenAPI document, or nearly, is a server error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

pytest.importorskip("schemathesis", reason="schemathesis is not installed")
import schemathesis

from tests.counts import few_or_many
from tests.service.conftest import settings_for
from tests.service.scenes import write_snapshot
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread

EXAMPLES = few_or_many(2, 10)  # an operation


@pytest.mark.counted
def test_no_request_that_the_description_suggests_is_a_server_error(tmp_path: Any) -> None:
    operations = 0
    with Store(settings_for(tmp_path)) as store:
        store.load_snapshot(write_snapshot(tmp_path))
        with ServerThread(store) as server:
            schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
            for found in schema.exclude(path_regex="/deltas$").get_all_operations():  # Arrow: `tools/fuzz.py` makes it
                operations += 1
                _try(found.ok(), server.url)
    assert operations > 10


def _try(operation: Any, url: str) -> None:
    modes = list(schemathesis.GenerationMode)

    @given(case=operation.as_strategy(generation_mode=modes[0]) | operation.as_strategy(generation_mode=modes[-1]))
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def no_server_error(case: Any) -> None:
        answer = case.call(base_url=url, timeout=60)
        assert answer.status_code < 500 or answer.status_code in (501, 503), (case.as_curl_command(), answer.text)

    no_server_error()
