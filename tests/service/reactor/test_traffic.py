"""Look-ups as the world sends them, through the reactors: any size, id, header and path, each with the right rows and none by Python."""

from __future__ import annotations

import json
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import tierstore
from tests.collisions import pair
from tests.engine.quick_build import in_process
from tests.service.conftest import eventually, settings_for
from tierstore.access.roles import Rates, Role
from tierstore.access.tokens import TokenFile
from tierstore.engine.store import Store
from tierstore.reactor import layout as kernel
from tierstore.service.reactor import plan_index
from tierstore.service.server import ServerThread

ROWS, DIM = 40_000, 4
COLLIDING = pair()  # two strings of one hash
OIP = "/v2/models/ctr/infer"


def row_of(keys: np.ndarray) -> np.ndarray:
    """What is stored under each key, found or not."""
    vectors = (keys[:, None] * np.array([1, -1, 0.5, 2], np.float32)).astype(np.float32)
    vectors[(keys < 0) | (keys >= ROWS)] = 0.25
    return vectors


def write(root: Path, version: int, *, plain: bool = False) -> Path:
    """`plain`: without strings that collide, and without rows that are in memory from the beginning."""
    where = root / f"ctr-{version}"
    keys = np.arange(ROWS)
    with tierstore.SnapshotWriter(where, model="ctr", version=version) as writer:
        writer.table("item", dim=DIM, default=[0.25] * DIM).write(keys, row_of(keys))
        words = [f"w{i}" for i in range(200)] + ["grün", *([] if plain else COLLIDING)]
        writer.table("word", dim=DIM, key="string").write(words, row_of(np.arange(len(words))))
        writer.feature("item_id", table="item")
        writer.feature("clicked", table="item", combiner="sum")
        writer.feature("word", table="word")
        if not plain:
            writer.warmup("item", keys)
    return where


class Served:
    def __init__(self, store: Store, server: ServerThread) -> None:
        self.store, self.server = store, server

    @property
    def by_reactors(self) -> int:
        return int(self.server.service.reactors.answers)

    @property
    def handed_on(self) -> dict[str, int]:
        counts: dict[str, int] = self.server.service.reactors.handed_on
        return counts

    def connect(self) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.server.port), timeout=60)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("traffic")
    with Store(
        settings_for(root, host_budget="16MiB", max_request="8MiB", max_response="32MiB", max_inflight="64MiB")
    ) as store:  # built by helpers, which tell colliding strings apart
        store.load_snapshot(write(root, 1))
        store.model("ctr").lookup("word", [f"w{i}" for i in range(200)])  # most are in memory; readers have the others
        with ServerThread(store) as server:
            yield Served(store, server)


def binary(name: str, array: np.ndarray | list[bytes]) -> tuple[dict[str, Any], bytes]:
    """(description, bytes) of an input."""
    if isinstance(array, list):
        data, datatype, shape = b"".join(struct.pack("<I", len(text)) + text for text in array), "BYTES", [len(array)]
    else:
        data, shape = array.tobytes(), list(array.shape)
        datatype = {"int64": "INT64", "uint64": "UINT64", "float32": "FP32"}[array.dtype.name]
    return {"name": name, "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(data)}}, data


def message(
    inputs: dict[str, Any],
    outputs: list[str],
    *headers: str,
    path: str = OIP,
    version: str = "1.1",
    host: str | None = "localhost",
    **more: Any,
) -> bytes:
    tensors = [binary(name, array) for name, array in inputs.items()]
    wanted = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    document = {**more, "inputs": [tensor for tensor, _ in tensors], "outputs": wanted}
    text = json.dumps(document).encode()
    tail = b"".join(data for _, data in tensors)
    lines = [f"POST {path} HTTP/{version}", *([] if host is None else [f"Host: {host}"]), *headers]
    lines += [f"Content-Length: {len(text) + len(tail)}", f"Inference-Header-Content-Length: {len(text)}"]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + text + tail


def in_json(
    inputs: dict[str, Any], outputs: list[str], *headers: str, path: str = OIP, binary: bool = False, **more: Any
) -> bytes:
    """A look-up whose inputs are in its JSON, and with `binary` not set its outputs too."""
    tensors = []
    for name, array in inputs.items():
        if isinstance(array, list):
            datatype, shape, data = "BYTES", [len(array)], [text.decode("utf-8", "surrogateescape") for text in array]
        else:
            datatype = {"int64": "INT64", "uint64": "UINT64", "float32": "FP32"}[array.dtype.name]
            shape, data = list(array.shape), array.tolist()
        tensors.append({"name": name, "shape": shape, "datatype": datatype, "data": data})
    wanted = [{"name": name, **({"parameters": {"binary_data": True}} if binary else {})} for name in outputs]
    document = {"inputs": tensors, **({"outputs": wanted} if outputs else {}), **more}
    text = json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogateescape")
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", *headers, f"Content-Length: {len(text)}"]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + text


class Answer:
    def __init__(self, made: socket.socket) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            more = made.recv(1 << 16)
            assert more, data
            data += more
        self.head, _, body = data.partition(b"\r\n\r\n")
        self.status = int(self.head.split()[1])
        length = int(re.search(rb"(?i)content-length: (\d+)", self.head)[1])  # type: ignore[index]
        while len(body) < length:
            body += made.recv(1 << 20)
        self.body, self.outputs = body, {}
        found = re.search(rb"(?i)inference-header-content-length: (\d+)", self.head)
        at = int(found[1]) if found else len(body)
        self.document = json.loads(body[:at])
        for output in self.document.get("outputs", []) if "model_name" in self.document else ():
            size = output.get("parameters", {}).get("binary_data_size", 0)
            dtype = {"FP32": np.float32, "BOOL": np.bool_, "INT64": np.int64, "FP16": np.float16}[output["datatype"]]
            if "data" in output:
                self.outputs[output["name"]] = np.array(output["data"], dtype).reshape(output["shape"])
                continue
            self.outputs[output["name"]] = np.frombuffer(body[at : at + size], dtype).reshape(output["shape"])
            at += size


def ask(served: Served, made: socket.socket, sent: bytes, *, by_reactor: bool = True) -> Answer:
    """The answer to a look-up, which a reactor gives, or Python."""
    before = served.by_reactors
    made.sendall(sent)
    answer = Answer(made)
    assert answer.status == 200, answer.body
    assert served.by_reactors - before == by_reactor, served.handed_on
    return answer


def teach(served: Served, sent: bytes) -> None:
    """Have a structure learned."""
    with served.connect() as made:
        for _ in range(2):
            made.sendall(sent)
            assert Answer(made).status == 200


def test_sizes_ids_and_timeouts_at_random_take_one_plan(served: Served) -> None:
    random = np.random.default_rng(1)
    teach(served, message({"item_id": np.arange(3)}, ["item_id", "item_id.found"]))
    plans = len(served.server.service.plans)
    with served.connect() as made:
        for n in (0, 1, 2, 4096, 16384, *random.integers(1, 3000, 30).tolist()):
            keys = random.integers(0, ROWS + 100, n)
            keys[keys >= ROWS] = 0
            ident = str(random.choice(["", "a", "6045257d-d777", 'quoted "x"', "tab\t"]))
            more = {"id": ident, "parameters": {"timeout": 5_000_000}} if random.random() < 0.8 else {}
            answer = ask(served, made, message({"item_id": keys}, ["item_id", "item_id.found"], **more))
            assert answer.document.get("id") == more.get("id")
            assert answer.document["outputs"][0]["shape"] == [n, DIM]
            np.testing.assert_array_equal(answer.outputs["item_id"], row_of(keys))
            assert answer.outputs["item_id.found"].all()
    assert len(served.server.service.plans) == plans


def test_ragged_bags_of_any_size_are_one_plan(served: Served) -> None:
    random = np.random.default_rng(2)

    def bags(n: int, count: int) -> dict[str, Any]:
        starts = np.sort(random.integers(0, n + 1, count))
        starts[:1] = 0
        return {
            "clicked": random.integers(0, ROWS, n),
            "clicked.offsets": starts,
            "item_id": random.integers(0, ROWS, 3),
        }

    teach(served, message(bags(5, 2), ["clicked", "item_id"]))
    with served.connect() as made:
        for n, count in ((0, 0), (1, 1), (700, 40), (3, 9), (2000, 1)):
            wanted = bags(n, count)
            answer = ask(served, made, message(wanted, ["clicked", "item_id"], id=f"{n}"))
            starts = wanted["clicked.offsets"].tolist()
            expected = [row_of(wanted["clicked"][a:b]).sum(0) for a, b in pairwise([*starts, n] if starts else [])]
            assert answer.outputs["clicked"].shape == (count, DIM)
            np.testing.assert_allclose(
                answer.outputs["clicked"].reshape(-1, DIM), np.reshape(expected, (-1, DIM)), rtol=1e-5
            )
            np.testing.assert_array_equal(answer.outputs["item_id"], row_of(wanted["item_id"]))


def test_each_path_to_a_version_learns_for_itself_and_a_label_that_moves_is_followed(
    served: Served, tmp_path: Path
) -> None:
    inputs = {"item_id": np.arange(5)}
    paths = [OIP, *(f"/v2/models/ctr/versions/{which}/infer" for which in ("1", "stable", "mine"))]
    served.store.label("ctr", "mine", 1)
    for path in paths:
        teach(served, message(inputs, ["item_id"], path=path))
    with served.connect() as made:
        for path in paths:
            answer = ask(served, made, message(inputs, ["item_id"], path=path))
            assert answer.document["model_version"] == "1"
        served.store.load_snapshot(write(tmp_path, 2), activate=False)
        served.store.canary("ctr", 2, 0.0)
        try:
            of_canary = message(inputs, ["item_id"], path="/v2/models/ctr/versions/canary/infer")
            teach(served, of_canary)
            assert ask(served, made, of_canary).document["model_version"] == "2"
            for version in (2, 1, 2):
                served.store.label("ctr", "mine", version)
                made.sendall(message(inputs, ["item_id"], path=paths[-1]))
                assert Answer(made).document["model_version"] == str(version)
                assert ask(served, made, message(inputs, ["item_id"], path=paths[-1])).document["model_version"] == str(
                    version
                )
        finally:
            served.store.withdraw("ctr")


def test_string_keys_are_hashed_by_the_reactor(served: Served) -> None:
    words = [b"w0", b"w199", "grün".encode(), b"w5", b""]
    teach(served, message({"word": [b"w1"]}, ["word", "word.found"]))
    with served.connect() as made:
        answer = ask(served, made, message({"word": words[:4]}, ["word", "word.found"], id="s"))
        np.testing.assert_array_equal(answer.outputs["word"], row_of(np.array([0, 199, 200, 5])))
        assert answer.outputs["word.found"].all()
        assert ask(served, made, message({"word": []}, ["word", "word.found"])).outputs["word"].shape == (0, DIM)


def test_strings_that_share_a_hash_and_those_that_are_none_are_for_python(served: Served) -> None:
    teach(served, message({"word": [b"w1"]}, ["word", "word.found"]))
    with served.connect() as made:
        colliding = [word.encode() for word in COLLIDING]
        answer = ask(served, made, message({"word": colliding}, ["word", "word.found"]), by_reactor=False)
        np.testing.assert_array_equal(answer.outputs["word"], row_of(np.array([201, 202])))
        for wrong in (b"\xff", b"\xed\xa0\x80", b"w1\xc3"):
            made.sendall(message({"word": [wrong]}, ["word", "word.found"]))
            assert Answer(made).status == 400
        text = message({"word": [b"w1", b"w2"]}, ["word", "word.found"])
        made.sendall(text[:-3] + b"\xff\xff\xff")
        assert Answer(made).status == 400


@pytest.mark.parametrize("outputs", [["item_id"], ["clicked.found"], ["item_id.found", "clicked.found"]], ids=str)
def test_what_nothing_is_asked_of_is_checked_all_the_same(served: Served, outputs: list[str]) -> None:
    inputs = {"clicked": np.arange(6), "clicked.offsets": np.array([0, 2]), "item_id": np.arange(3)}
    inputs["clicked.weights"] = np.ones(6, np.float32)
    teach(served, message(inputs, outputs))
    with served.connect() as made:
        assert set(ask(served, made, message(inputs, outputs)).outputs) == set(outputs)
        for name, wrong in (
            ("clicked.offsets", np.array([1, 2])),
            ("clicked.offsets", np.array([0, 7])),
            ("clicked.weights", np.full(6, np.nan, np.float32)),
            ("clicked.weights", np.ones(5, np.float32)),
        ):
            made.sendall(message(inputs | {name: wrong}, outputs))
            assert Answer(made).status == 400


@pytest.mark.parametrize(
    "headers",
    [
        ["x-correlation-id: 7"], ["x-envoy-peer-metadata: ChoKCkNMVVNURVJfSUQ"], ["X-Scheme:https"], ["cf-ray:\t8f1"], ["sentry-trace: a-b-1"],
        ["l5d-dst-override: a.b"], ["ce-id: 1", "ce-type: x"], ["sec-fetch-mode: cors"], ["X-\xe4: 1"[0:2] + "a: \xe4\xf6"],
        ["Accept-Encoding: gzip"], ["Accept-Encoding: identity"], ["Accept-Encoding: *"], ["Accept-Encoding: gzip,br"], ["Accept-Encoding: gzip;q=1.0"],
        ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAA"], ["connection: Upgrade, HTTP2-Settings"],
        ["TE: trailers"], ["Content-Type: application/json; charset=utf-8"], ["Expect-CT: x"], ["x!#$%&'*+.^_`|~: y"],
    ],
    ids=lambda headers: headers[0],
)  # fmt: skip
def test_headers_that_nobody_reads_change_nothing(served: Served, headers: list[str]) -> None:
    teach(served, message({"item_id": np.arange(3)}, ["item_id"]))
    with served.connect() as made:
        for n in (2, 7):
            answer = ask(served, made, message({"item_id": np.arange(n)}, ["item_id"], *headers))
            np.testing.assert_array_equal(answer.outputs["item_id"], row_of(np.arange(n)))
            assert b"content-encoding" not in answer.head.lower()


@pytest.mark.parametrize(
    "accepted",
    ["identity;q=0, gzip", "*;q=0.0, gzip;q=0.5", "deflate, identity ; q=0"],
    ids=["identity", "all", "deflate"],
)
def test_who_refuses_an_answer_as_it_is_gets_it_coded(served: Served, accepted: str) -> None:
    with httpx.Client(base_url=served.server.url, timeout=60) as http:
        for _ in range(2):
            tensor = {"name": "item_id", "shape": [2], "datatype": "INT64", "data": [1, 2]}
            answer = http.post(OIP, json={"inputs": [tensor]}, headers={"Accept-Encoding": accepted})
            assert answer.headers["content-encoding"] in accepted
            assert answer.json()["outputs"][0]["shape"] == [2, DIM]


@pytest.mark.parametrize(
    ("version", "headers"),
    [("1.0", []), ("1.0", ["Connection: close"]), ("1.0", ["Connection: keep-alive"]), ("1.1", ["Connection: close"]), ("1.1", ["connection:keep-alive, Close"])],
)  # fmt: skip
def test_a_connection_that_ends_with_its_answer_is_the_reactors_too(
    served: Served, version: str, headers: list[str]
) -> None:
    teach(served, message({"item_id": np.arange(3)}, ["item_id"]))
    for keys in (np.arange(5), np.arange(20_000)):
        with served.connect() as made:
            sent = message({"item_id": keys}, ["item_id"], *headers, version=version)
            answer = ask(served, made, sent)
            np.testing.assert_array_equal(answer.outputs["item_id"], row_of(keys))
            assert b"\r\nconnection: close" in answer.head
            assert made.recv(1) == b""


def test_one_of_http_1_0_without_a_name_is_refused_by_python(served: Served) -> None:
    with served.connect() as made:
        made.sendall(message({"item_id": np.arange(3)}, ["item_id"], version="1.0", host=None))
        assert Answer(made).status == 403


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready"])
def test_health_is_told_without_a_name_too(served: Served, path: str) -> None:
    """As load balancers ask by default; but not to a page of another site."""
    for headers, status in (("", 200), ("Origin: http://evil.example\r\n", 403), ("Host: evil.example\r\n", 403)):
        with served.connect() as made:
            made.sendall(f"GET {path} HTTP/1.0\r\n{headers}\r\n".encode())
            assert int(made.makefile("rb").readline().split()[1]) == status


def test_a_large_look_up_keeps_no_other_connection_waiting_and_is_right(served: Served) -> None:
    """Its body is above what one read takes, its rows above what a reactor does between two others."""
    teach(served, message({"item_id": np.arange(3)}, ["item_id", "item_id.found"]))
    random = np.random.default_rng(3)
    with served.connect() as made:
        for n in (17_000, 150_000):
            keys = random.integers(-5, ROWS + 5, n)
            answer = ask(served, made, message({"item_id": keys}, ["item_id", "item_id.found"], id="large"))
            np.testing.assert_array_equal(answer.outputs["item_id"], row_of(keys))
            np.testing.assert_array_equal(answer.outputs["item_id.found"], (keys >= 0) & (keys < ROWS))
            assert answer.document["id"] == "large"
    eventually(lambda: served.server.service.inflight.used_bytes == 0, "nothing is held")


def test_large_bags_are_a_reactors_too(served: Served) -> None:
    keys, starts = np.arange(30_000), np.arange(0, 30_000, 3)
    wanted = {"clicked": keys, "clicked.offsets": starts}
    teach(served, message({"clicked": keys[:9], "clicked.offsets": starts[:3]}, ["clicked"]))
    with served.connect() as made:
        answer = ask(served, made, message(wanted, ["clicked"]))
        np.testing.assert_allclose(answer.outputs["clicked"], row_of(keys).reshape(-1, 3, DIM).sum(1), rtol=1e-5)


def test_many_offsets_that_are_only_checked_are_no_work_between_two_others(served: Served) -> None:
    wanted = {"clicked": np.arange(5), "clicked.offsets": np.zeros(300_000, np.int64)}
    teach(served, message({**wanted, "clicked.offsets": np.zeros(2, np.int64)}, ["clicked.found"]))
    with served.connect() as made:
        assert ask(served, made, message(wanted, ["clicked.found"])).outputs["clicked.found"].all()


def test_a_large_body_for_python_counts_once(served: Served) -> None:
    """A string that is too long to be hashed between two other requests."""
    teach(served, message({"word": [b"w1"]}, ["word", "word.found"]))
    budget = served.server.service.inflight
    eventually(lambda: budget.used_bytes == 0, "nothing is held")
    budget.hold(54 << 20)  # of 64
    try:
        with served.connect() as made:
            sent = message({"word": [b"x" * (7 << 20)]}, ["word", "word.found"])
            assert not ask(served, made, sent, by_reactor=False).outputs["word.found"].any()
    finally:
        budget.release(54 << 20)
    eventually(lambda: budget.used_bytes == 0, "it is given back")


def test_a_large_body_counts_as_far_as_it_has_come_and_is_given_back_when_its_client_leaves(served: Served) -> None:
    sent = message({"item_id": np.arange(200_000)}, ["item_id"])
    budget = served.server.service.inflight
    eventually(lambda: budget.used_bytes == 0, "nothing is held")
    with served.connect() as made:
        made.sendall(sent[:1_000_000])
        eventually(lambda: budget.used_bytes == 1_000_000, "what has come is held")
    eventually(lambda: budget.used_bytes == 0, "it is given back")


def test_why_a_request_was_left_to_python_is_counted(served: Served) -> None:
    teach(served, message({"item_id": np.arange(3)}, ["item_id"]))
    plain = message({"item_id": np.arange(3)}, ["item_id"])

    def reason(sent: bytes) -> str:
        before = served.handed_on
        with served.connect() as made:
            made.sendall(sent)
            Answer(made)
        return ", ".join(name for name, count in served.handed_on.items() if count > before[name])

    assert reason(b"GET /v2/models/ctr HTTP/1.1\r\nHost: localhost\r\n\r\n") == "other_request"
    assert reason(plain.replace(b"\r\n", b"\r\nExpect: 100-continue\r\n", 1).replace(b"Expect", b"X-Expect")) == ""
    assert reason(plain.replace(b"\r\n", b"\r\nX-Request-Timeout-Ms: x\r\n", 1)) == "header"
    assert reason(plain.replace(b"POST", b"POST", 1).replace(b"infer ", b"infer?a=1 ", 1)) == "header"
    assert reason(plain.replace(b"\r\n", b"\r\nCookie: " + b"x" * 9000 + b"\r\n", 1)) == "header"
    assert reason(message({"item_id": np.arange(3)}, ["item_id"], id="\x01")) == "form"
    assert reason(plain.replace(b'"name": "item_id"', b'"name": "item_di"', 1)) == "no_plan"
    assert reason(plain.replace(b'"shape": [3]', b'"shape": [4]', 1)) == "values"
    with httpx.Client(base_url=served.server.url, timeout=60) as http:
        text = http.get("/metrics").text
    assert re.search(r'tierstore_reactor_handed_on_total\{reactor="0",reason="no_plan"\} [0-9.e+]+', text)
    assert set(re.findall(r'handed_on_total\{reactor="0",reason="(\w+)"', text)) == set(kernel.REASONS)


def test_who_sends_a_new_structure_each_time_has_few_of_them_learned(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = served.server.service.plans
    monkeypatch.setattr(plans, "_may_learn", 3.0)
    monkeypatch.setattr(plans, "_clock", lambda: plans._learned_at_s)
    known = len(plans)
    with served.connect() as made:
        for outputs in permutations(["item_id", "item_id.found", "clicked", "clicked.found"], 3):
            made.sendall(message({"clicked": np.arange(2), "item_id": np.arange(1)}, list(outputs)))
            assert Answer(made).status == 200
    assert len(plans) == known + 3


def test_the_index_keeps_what_is_used(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of one set make room for each other, the least recently used first."""
    monkeypatch.setattr(
        plan_index.layout, "SETS", 1
    )  # of Python's side: all plans that are new go where the first set is
    plans = plan_index.PlanIndex(served.store, served.server.service.rates, kernel.SHARED.new(), 1, lambda *_: None)
    view = served.store.model("ctr").publisher.served.active
    lines = [f"line{i:012}" for i in range(12)]
    for line in lines:
        plans.learn_rows("ctr", view, "item", "/upstream/models/ctr/x/rows", line)
        first = next(iter(plans._planned.values()))
        first.words["last_used"] = 1 << 62
    assert len(plans) == plan_index.layout.WAYS
    kept = {place[1].decode() for place in plans._planned}
    assert kept == {lines[0], *lines[-7:]}


# --- who may ask


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[Served, dict[str, str]]]:
    """A service with tokens, and their headers by name; model `other` beside `ctr`, which has rates."""
    file = TokenFile(tmp_path / "data" / "tokens.json")
    (tmp_path / "data").mkdir()
    tokens = {
        "reader": file.create(Role.READER)[1],
        "ctr": file.create(Role.READER, ["ctr"])[1],
        "other": file.create(Role.READER, ["other"])[1],
        "slow": file.create(Role.READER, rates=Rates(requests=5))[1],
        "keys": file.create(Role.READER, rates=Rates(keys=1000))[1],
        "once": file.create(Role.READER, rates=Rates(requests=1))[1],
        "metrics": file.create(Role.METRICS)[1],
    }
    headers = {name: f"Authorization: Bearer {secret}" for name, secret in tokens.items()}
    quotas = {"limited": {"requests_per_second": 6}}
    with in_process(), ExitStack() as stack:
        store = stack.enter_context(Store(settings_for(tmp_path, quotas=quotas)))
        for model in ("ctr", "other", "limited"):
            with tierstore.SnapshotWriter(tmp_path / model, model=model, version=1) as writer:
                writer.table("item", dim=DIM).write(np.arange(100), row_of(np.arange(100)))
                writer.feature("item_id", table="item")
                writer.warmup("item", np.arange(100))
            store.load_snapshot(tmp_path / model)
        yield Served(store, stack.enter_context(ServerThread(store))), headers


def asked(served: Served, *headers: str, model: str = "ctr", n: int = 3) -> tuple[int, bool]:
    """(status, whether a reactor answered)."""
    before = served.by_reactors
    with served.connect() as made:
        made.sendall(message({"item_id": np.arange(n)}, ["item_id"], *headers, path=f"/v2/models/{model}/infer"))
        return Answer(made).status, served.by_reactors > before


def until_known(served: Served, *headers: str, model: str = "ctr") -> None:
    eventually(lambda: asked(served, *headers, model=model) == (200, True), "a reactor knows the caller and the plan")


def test_a_token_is_for_its_models_alone_also_where_a_reactor_answers(guarded: tuple[Served, dict[str, str]]) -> None:
    served, headers = guarded
    for model in ("ctr", "other"):
        until_known(served, headers["reader"], model=model)
    until_known(served, headers["ctr"])
    until_known(served, headers["other"], model="other")
    for _ in range(3):
        assert asked(served, headers["ctr"], model="other") == (403, False)
        assert asked(served, headers["other"], model="ctr") == (403, False)
        assert asked(served, headers["metrics"]) == (403, False)
        assert asked(served) == (401, False)
        assert asked(served, headers["reader"][:-1]) == (401, False)
        assert asked(served, headers["ctr"]) == (200, True)


def test_a_reactor_counts_rates_of_callers_and_models(guarded: tuple[Served, dict[str, str]]) -> None:
    served, headers = guarded
    until_known(served, headers["reader"])
    until_known(served, headers["slow"])
    until_known(served, headers["keys"])
    eventually(lambda: asked(served, headers["reader"], model="limited") == (200, True), "its plan is known")
    for header, model, most in ((headers["slow"], "ctr", 5), (headers["reader"], "limited", 6)):
        eventually(lambda: asked(served, header, model=model)[0] == 429, "it has had what it may")  # noqa: B023
        answers = [asked(served, header, model=model) for _ in range(30)]
        assert (429, False) in answers
        assert {status for status, _ in answers} <= {200, 429}
        assert sum(status == 200 for status, _ in answers) <= most
    eventually(lambda: asked(served, headers["keys"], n=90) == (200, True), "it may again")
    eventually(lambda: asked(served, headers["keys"], n=90)[0] == 429, "it has had its keys")
    assert asked(served, headers["reader"]) == (200, True), "others go on"


@pytest.mark.thorough
def test_what_readers_give_back_to_python_is_charged_once(
    guarded: tuple[Served, dict[str, str]], tmp_path: Path
) -> None:
    """Keys that a delta changed and memory lacks are read by Python, for a caller who may ask once in a second as well."""
    served, headers = guarded
    served.store.load_snapshot(write(tmp_path, 2, plain=True))
    model, changed = served.store.model("ctr"), np.arange(30_000, 30_010)
    with tierstore.DeltaWriter(tmp_path / "one.arrow", model="ctr", seq=1, event_time=datetime.now(UTC)) as writer:
        writer.upsert("item", changed, np.full((len(changed), DIM), 5, np.float32))
    served.store.apply_delta(tmp_path / "one.arrow")
    eventually(lambda: not model.publisher.served.active.overlays, "it is folded")
    until_known(served, headers["once"])
    for key in changed[:3]:
        eventually(lambda: asked(served, headers["once"])[0] == 200, "it may ask again")
        time.sleep(1.1)  # what a second allows is there again
        with served.connect() as made:
            made.sendall(message({"item_id": np.array([key])}, ["item_id"], headers["once"]))
            answer = Answer(made)
        assert answer.status == 200, answer.body
        np.testing.assert_array_equal(answer.outputs["item_id"], np.full((1, DIM), 5, np.float32))


def test_however_a_caller_spells_the_services_name_a_reactor_answers(guarded: tuple[Served, dict[str, str]]) -> None:
    served, headers = guarded
    until_known(served, headers["reader"])
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1", "127.8.9.7:80", "[::1]", "[::1]:9"):
        for by_reactor in (host == "localhost", True):  # Python decides about a value once
            sent = message({"item_id": np.arange(3)}, ["item_id"], headers["reader"], host=host)
            with served.connect() as made:
                ask(served, made, sent, by_reactor=by_reactor)
    for host in ("evil.example", "127.0.0.1.evil.example", "0127.0.0.1", "[::2]", "localhost:x", "10.0.0.1", ""):
        with served.connect() as made:
            made.sendall(message({"item_id": np.arange(3)}, ["item_id"], headers["reader"], host=host))
            assert Answer(made).status in (400, 403), host


@pytest.mark.thorough
def test_a_token_that_is_revoked_is_no_reactors_any_more(
    guarded: tuple[Served, dict[str, str]], tmp_path: Path
) -> None:
    served, headers = guarded
    until_known(served, headers["reader"])
    file = TokenFile(tmp_path / "data" / "tokens.json")
    for token in file.tokens():
        if token.role is Role.READER:
            file.revoke(token.id)
    eventually(lambda: asked(served, headers["reader"])[0] == 401, "it is not known any more")
