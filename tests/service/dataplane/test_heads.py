"""Heads over every protocol: each is asked as a model of its own name, and answers from the model's view."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

import tierstore
from tests.engine import scenes
from tests.engine.quick_build import in_process
from tests.engine.reads.test_heads import HEADS, INPUTS, KEYS, graph, rows, snapshot
from tests.extras import has_grpc
from tests.predict import onnx_models as om
from tests.service.callers import (
    UNKNOWN,
    Caller,
    OurClient,
    Refused,
    TfsColumns,
    TfsGrpc,
    TritonGrpc,
    TritonHttp,
    over_all,
    tfs_call,
)
from tests.service.conftest import GRPC, eventually, settings_for
from tierstore.access.roles import Role
from tierstore.access.tokens import TokenFile
from tierstore.engine.store import Store
from tierstore.errors import Forbidden, Overloaded
from tierstore.service.server import ServerThread
from tierstore.types import head_name


def named(head: str) -> str:
    return head_name("ctr", head)


def inputs_of(head: str) -> dict[str, np.ndarray]:
    """Arrays by input."""
    found: dict[str, Any] = {name: INPUTS[name] for name in HEADS[head]}
    if "clicked" in found:
        found |= dict(zip(("clicked", "clicked.offsets"), found["clicked"], strict=True))
    return found


def witnessed(caller: Caller, head: str, **how: Any) -> tuple[int, int]:
    """(number of the rows, number of the graph) of an answer."""
    (seen,) = caller.ask(named(head), inputs_of(head), ["seen"], **how).values()
    return om.witnessed(seen)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """Version 1 of `ctr` with three heads, all its numbers 1, and version 2, its canary for who names it, all 2."""
    root = tmp_path_factory.mktemp("heads")
    with in_process(), Store(settings_for(root, grpc_port=GRPC, keep_versions=9)) as store:
        store.load_snapshot(snapshot(root))
        store.load_snapshot(snapshot(root, 2, number=2), activate=False)
        store.canary("ctr", 2, 0.0)
        with ServerThread(store) as server:
            eventually(lambda: server.service.reactors_state == "running", "the reactors")
            yield server


@pytest.fixture
def web(server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@over_all()
def test_heads_are_asked_by_name(caller: Caller) -> None:
    answers = caller.server.service.reactors.answers
    for head in HEADS:
        for _ in range(8):
            assert witnessed(caller, head) == (1, 1)
        assert witnessed(caller, head, version=2) == (2, 2)
    if caller.compiled and not isinstance(caller, OurClient):  # whose ids decide beside a canary, which is for Python
        assert caller.server.service.reactors.answers - answers > 12, "the compiled loops answer heads"
    with pytest.raises(Refused, match="no head 'nope'") as refused:
        caller.ask("ctr.nope", {"item_id": KEYS}, ["seen"])
    assert refused.value.kind == UNKNOWN


@over_all()
def test_rows_of_the_model_are_looked_up_under_the_name_of_a_head(caller: Caller) -> None:
    (rows_of_user,) = caller.ask("ctr.cvr", {"user_id": KEYS}, ["user_id"]).values()
    np.testing.assert_array_equal(rows_of_user, np.ones((9, 4)))
    both = caller.ask("ctr.cvr", {"item_id": KEYS}, ["seen", "item_id"])
    assert om.witnessed(both["seen"]) == (1, 1)
    np.testing.assert_array_equal(both["item_id"], np.ones((9, 8)))


@over_all(callers=[TritonHttp, TritonGrpc])
def test_documents_of_the_open_inference_protocol_name_heads(caller: TritonHttp) -> None:
    client, http = caller.client, type(caller) is TritonHttp
    how = {} if http else {"as_json": True}
    for head in HEADS:
        for version in ("1", "2"):
            witnessed(caller, head, version=int(version))
            assert client.is_model_ready(named(head), version)
        metadata = client.get_model_metadata(named(head), **how)
        assert (metadata["name"], metadata["versions"]) == (named(head), ["1", "2"])
        assert metadata["outputs"][0]["name"] == "seen"
        config = client.get_model_config(named(head), **how)
        assert (config if http else config["config"])["name"] == named(head)
        stats = client.get_inference_statistics(named(head), **how)
        counts = {one["version"]: int(one["inference_count"]) for one in stats["model_stats"]}
        assert min(counts["1"], counts["2"]) >= 1
    index = client.get_model_repository_index(**how)
    assert {(one["name"], one["version"], one["state"]) for one in (index if http else index["models"])} == {
        (named(head), version, "READY") for head in HEADS for version in "12"
    }
    with pytest.raises(InferenceServerException, match="no head 'nope'; version 1 has cvr, ltv"):
        client.get_model_metadata("ctr.nope")
    with pytest.raises(InferenceServerException, match=r"unknown model 'ctr\.'"):
        client.get_model_metadata("ctr.")
    for verb in (client.load_model, client.unload_model):
        with pytest.raises(InferenceServerException, match=r"'ctr\.cvr'"):
            verb("ctr.cvr")


def test_documents_of_tensorflow_serving_name_heads(server: ServerThread, web: httpx.Client) -> None:
    for head in HEADS:
        path = f"/v1/models/{named(head)}"
        states = web.get(path).json()["model_version_status"]
        assert [(one["version"], one["state"]) for one in states] == [("2", "AVAILABLE"), ("1", "AVAILABLE")]
        metadata = web.get(f"{path}/metadata").json()
        assert metadata["model_spec"]["name"] == named(head)
        signature = metadata["metadata"]["signature_def"]["signature_def"]["serving_default"]
        assert signature["outputs"].keys() == {"seen"}
    for path in ("ctr.nope", "ctr.nope/metadata"):
        response = web.get(f"/v1/models/{path}")
        assert (response.status_code, "no head 'nope'" in response.text) == (404, True)
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
    with grpc.insecure_channel(server.grpc_target) as channel:
        for head in HEADS:
            found = tfs_call(
                channel, "PredictionService/GetModelMetadata", named(head), metadata_field=["signature_def"]
            )
            assert found.model_spec.name == named(head)
            assert len(tfs_call(channel, "ModelService/GetModelStatus", named(head)).model_version_status) == 2


def test_status_and_metrics_name_heads(server: ServerThread, web: httpx.Client) -> None:
    caller = TfsColumns(server)
    for head in HEADS:
        witnessed(caller, head)
    caller.close()
    document = server.service.store.status()["models"]["ctr"]
    assert document["heads"].keys() == {"cvr", "ltv"}
    assert all(of["runs"] > 0 for of in document["heads"].values())
    assert [one["heads"] for one in document["versions"]] == [{"cvr": "served", "ltv": "served"}] * 2
    samples = {
        (sample.name, sample.labels.get("model"))
        for family in text_string_to_metric_families(web.get("/metrics").text)
        for sample in family.samples
    }
    for name in ("tierstore_predicts_total", "tierstore_dense_runs_total", "tierstore_model_requests_total"):
        assert {(name, named(head)) for head in HEADS} <= samples
    counted = server.service.inference_stats
    of_heads = [counted.of(named(head), 1).success for head in HEADS]
    assert counted.requests("ctr", 1).total >= sum(of_heads) > max(of_heads), "a canary is judged by all of them"


def test_a_head_is_loaded_and_unloaded_with_its_model(server: ServerThread, web: httpx.Client) -> None:
    for verb in ("load", "unload"):
        refused = web.post(f"/v2/repository/models/ctr.cvr/{verb}", json={})
        assert (refused.status_code, "head of model 'ctr'" in refused.text) == (400, True)
        assert web.post(f"/v2/repository/models/ctr.nothing/{verb}", json={}).status_code == 404
    assert web.get("/v2/models/ctr.cvr/ready").status_code == 200


def test_an_unknown_head_leaves_no_statistics(server: ServerThread, web: httpx.Client) -> None:
    for number in range(5):
        assert web.post(f"/v2/models/ctr.x{number}/infer", content=b"{}").status_code == 404
    names = {name for name, _, _ in server.service.inference_stats.by_version()}
    assert names <= {named(head) for head in HEADS}


def test_quotas_are_the_models(tmp_path: Path) -> None:
    quotas = {"ctr": {"keys_per_second": 100}}
    with in_process(), Store(settings_for(tmp_path, quotas=quotas)) as store, ServerThread(store) as server:
        store.load_snapshot(snapshot(tmp_path))

        def spend(client: tierstore.Client) -> None:
            for head in ("cvr", "ltv") * 100:
                client.predict(named(head), {name: INPUTS[name] for name in HEADS[head]})

        with tierstore.Client(server.url, retries=0) as client, pytest.raises(Overloaded, match="model ctr may have"):
            spend(client)


def test_a_token_of_a_model_is_for_its_heads_and_one_may_be_for_a_head_alone(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    held = TokenFile(settings.data / "tokens.json")
    _, of_model = held.create(Role.READER, models=["ctr"])
    _, of_head = held.create(Role.ADMIN, models=["ctr.cvr"])
    with in_process(), Store(settings) as store, ServerThread(store) as server:
        store.load_snapshot(snapshot(tmp_path))
        for _ in range(30):  # by Python, and by the compiled loops
            with tierstore.Client(server.url, token=of_model) as client:
                for head in HEADS:
                    client.predict(named(head), {name: INPUTS[name] for name in HEADS[head]})
            with tierstore.Client(server.url, token=of_head) as client:
                assert om.witnessed(client.predict("ctr.cvr", {"item_id": KEYS})) == (1, 1)
                for name in ("ctr", "ctr.ltv"):
                    with pytest.raises(Forbidden, match=r"is for ctr\.cvr alone"):
                        client.predict(name, {"item_id": KEYS})
        with tierstore.Client(server.url, token=of_head) as client, pytest.raises(Forbidden):
            client.deactivate("ctr")
        headers = {"authorization": f"Bearer {of_head}"}
        assert httpx.post(f"{server.url}/v2/repository/models/ctr.cvr/unload", headers=headers).status_code == 400


class Story:
    """What was published: of each version its numbers by head, moved on by deltas. `seen` has every state there may be."""

    def __init__(self) -> None:
        self.deltas: list[tuple[int | None, dict[str, int]]] = []  # the number of the rows, and those of graphs by head
        self.versions: dict[int, tuple[int, int]] = {}  # by number (delta_seq, the number of its rows and graphs)
        self.states: dict[str, set[tuple[int, int, int]]] = {head: set() for head in HEADS}

    def publish(self, version: int) -> None:
        """The state of a version with all deltas so far may be answered from now on."""
        delta_seq, stamp = self.versions[version]
        of, graphs = stamp, dict.fromkeys(HEADS, stamp)
        for rows_now, graphs_now in self.deltas[delta_seq:]:
            of = of if rows_now is None else rows_now
            graphs |= {head: number for head, number in graphs_now.items() if head in HEADS}
        for head, number in graphs.items():
            self.states[head].add((version, of, number))


def whole(caller: Caller, head: str) -> tuple[int, ...]:
    """(version where the protocol says it, number of the rows, number of the graph)."""
    answer = caller.ask(named(head), inputs_of(head), ["seen"])
    (seen,) = answer.values()
    return *(() if answer.version is None else (answer.version,)), *om.witnessed(seen)


@pytest.mark.thorough
def test_no_answer_of_three_heads_is_mixed_and_none_fails_while_all_of_it_changes(tmp_path: Path) -> None:
    story, over = Story(), threading.Event()
    wrong: list[str] = []
    counts: dict[str, int] = dict.fromkeys(HEADS, 0)
    with (
        in_process(),
        Store(settings_for(tmp_path, grpc_port=GRPC, keep_versions=9)) as store,
        ServerThread(store) as server,
    ):

        def asks(head: str) -> Iterator[Callable[[], tuple[int, ...]]]:
            kinds = [TritonHttp, TfsColumns, *([TritonGrpc, TfsGrpc] if has_grpc() else [])] * 2
            yield from itertools.cycle([functools.partial(whole, kind(server), head) for kind in kinds])

        def go_on(head: str) -> None:
            for ask in asks(head):
                if over.is_set():
                    return
                try:
                    got = ask()
                except Exception as error:  # noqa: BLE001 - none may fail
                    wrong.append(f"{head}: {error!r}")
                    return
                if not any(state[-len(got) :] == got for state in tuple(story.states[head])):
                    wrong.append(f"{head}: {got} was never published")
                counts[head] += 1

        def more(enough: int) -> None:
            before = dict(counts)
            eventually(lambda: wrong or all(counts[head] >= before[head] + enough for head in HEADS), "answers")

        def load(version: int, stamp: int) -> None:
            story.versions[version] = len(story.deltas), stamp
            story.publish(version)
            store.load_snapshot(snapshot(tmp_path, version, stamp, len(story.deltas)))

        def change(number: int, kind: int) -> None:
            rows_now = number if kind in (0, 2) else None
            changed = {1: ["cvr"], 2: list(HEADS), 3: ["", "ltv"]}.get(kind, [])
            story.deltas.append((rows_now, dict.fromkeys(changed, number)))
            story.publish(store.model("ctr").active_version or 0)
            heads: dict[str, bytes | None] = {head: graph(head, number) for head in changed}
            heads["trial"] = graph("cvr", number) if kind == 3 else None  # comes and goes beside them
            store.apply_delta(scenes.delta(len(story.deltas), rows(number) if rows_now else {}, heads=heads))

        load(1, 1)
        threads = [threading.Thread(target=go_on, args=(head,)) for head in HEADS]
        for thread in threads:
            thread.start()
        try:
            numbers = itertools.count(10)
            for version in (2, 3):
                for kind in (0, 1, 2, 3, 2, 0):
                    change(next(numbers), kind)
                    more(3)
                load(version, next(numbers))
                more(5)
                change(next(numbers), 2)
                story.publish(version - 1)
                store.rollback("ctr")
                more(5)
                change(next(numbers), 1)
                story.publish(version)
                store.activate("ctr", version)
                more(5)
        finally:
            over.set()
            for thread in threads:
                thread.join(60)
        assert wrong == []
        assert server.service.reactors.answers > 0, "the compiled loops were among them"
