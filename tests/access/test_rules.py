"""Which action a request is."""

from __future__ import annotations

import pytest

from tierstore.access.roles import Action
from tierstore.access.rules import of_grpc, of_http


@pytest.mark.parametrize(
    ("method", "path", "action", "model"),
    [
        ("GET", "/", Action.OPEN, None),
        ("GET", "/v2/health/ready", Action.OPEN, None),
        ("HEAD", "/v2/health/live", Action.OPEN, None),
        ("POST", "/v2/health/live", Action.ADMIN, None),
        ("GET", "/metrics", Action.METRICS, None),
        ("GET", "/v2", Action.ANY, None),
        ("GET", "/v2/", Action.ANY, None),
        ("POST", "/v2/models/ctr/infer", Action.READ, "ctr"),
        ("POST", "/v2/models/ctr/versions/7/infer", Action.READ, "ctr"),
        ("POST", "/v2//models/ctr//infer", Action.READ, "ctr"),
        ("POST", "/v2/models/ctr", Action.ADMIN, None),
        ("GET", "/v2/models/ctr", Action.READ, "ctr"),
        ("GET", "/v2/models/ctr/versions/7/config", Action.READ, "ctr"),
        ("GET", "/v2/models/stats", Action.READ, None),
        ("GET", "/v2/models/stats/config", Action.READ, "stats"),
        ("POST", "/v2/repository/index", Action.READ, None),
        ("POST", "/v2/repository/models/ctr/load", Action.ADMIN, "ctr"),
        ("POST", "/v2/systemsharedmemory/region/x/register", Action.ANY, None),
        ("POST", "/v1/models/ctr:predict", Action.READ, "ctr"),
        ("POST", "/v1/models/ctr/versions/7:predict", Action.READ, "ctr"),
        ("POST", "/V1/models/ctr:predict", Action.READ, "ctr"),
        ("GET", "/v1/models/ctr/metadata", Action.READ, "ctr"),
        ("GET", "/v1/models", Action.ADMIN, None),
        ("GET", "/admin/models", Action.READ, None),
        ("GET", "/admin/models/ctr", Action.READ, "ctr"),
        ("POST", "/admin/models/ctr/explain", Action.READ, "ctr"),
        ("POST", "/upstream/models/ctr/versions/1/tables/item/explain", Action.FRONT, "ctr"),
        ("POST", "/admin/models/ctr/deltas", Action.WRITE, "ctr"),
        ("POST", "/admin/models/ctr/snapshots", Action.ADMIN, "ctr"),
        ("DELETE", "/admin/models/ctr/versions/7", Action.ADMIN, "ctr"),
        ("GET", "/admin/jobs", Action.ADMIN, None),
        ("DELETE", "/admin/jobs/5f0c", Action.ADMIN, None),
        ("GET", "/new", Action.ADMIN, None),
        ("BREW", "/", Action.ADMIN, None),
    ],
)
def test_what_a_request_takes(method: str, path: str, action: Action, model: str | None) -> None:
    assert of_http(method, path) == (action, model)


def test_a_method_that_nobody_has_decided_about_is_for_admins() -> None:
    assert of_grpc("/inference.GRPCInferenceService/ModelInfer") is Action.READ
    assert of_grpc("/inference.GRPCInferenceService/New") is Action.ADMIN
