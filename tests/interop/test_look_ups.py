"""Look-ups of real clients, directly and through proxies, are answered by the reactors, whatever their size, id and headers."""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest

pytest.importorskip("tritonclient.http", reason="needs tritonclient, of the extra dev")

import tierstore
from tests.engine.quick_build import in_process
from tests.interop import look_ups, proxies
from tests.service.conftest import settings_for
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread

KEYS = 5000
UNKNOWN = -1.0
SHAPE_OF_ROW = np.array([1, -2, 0.5, 1024], np.float32)
FIRST = 2  # that Python answers: of a structure, and of those that ask by a name of the service


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    root = tmp_path_factory.mktemp("look-ups")
    keys = np.arange(KEYS)
    with tierstore.SnapshotWriter(root / "snapshot", model=look_ups.MODEL, version=1) as writer:
        item = writer.table("item", dim=look_ups.DIM, default=(UNKNOWN * SHAPE_OF_ROW).tolist())
        item.write(keys, keys[:, None].astype(np.float32) * SHAPE_OF_ROW)
        writer.feature(look_ups.FEATURE, table="item")
    with in_process(), Store(settings_for(root)) as store:
        store.load_snapshot(root / "snapshot")
        store.model(look_ups.MODEL).lookup(look_ups.FEATURE, keys)
        with ServerThread(store) as server:
            yield server


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="module")
def url_of(server: ServerThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """The URL by which a proxy leads to the service; each is started once."""
    with ExitStack() as stack:
        urls = {"directly": server.url}

        def url(way: str) -> str:
            if way not in urls:
                where = tmp_path_factory.mktemp("proxy")
                proxy = (proxies.PROXIES | proxies.OF_HTTP2)[way]
                urls[way] = stack.enter_context(proxies.started(proxy, server.port, where))
            return urls[way]

        yield url


def asked(behind: str = "") -> list[look_ups.LookUp]:
    """Sizes at random; every other one has an id, with `behind` at its end."""
    draw = np.random.default_rng(17)
    sizes = [3, 5, *(2 ** draw.uniform(0, 11.5, 20)).astype(int).tolist(), 1, 8000, 2, 20000, 3]
    ids = ["", "7", "a request: {[(1)], }", *(str(uuid.UUID(bytes=draw.bytes(16))) for _ in sizes)]
    return [
        look_ups.LookUp(draw.integers(-KEYS // 4, KEYS, size), ids[number // 2] + behind if number % 2 else None)
        for number, size in enumerate(sizes)
    ]


def counted(server: ServerThread) -> Counter[str]:
    """What the service counts of its reactors, by name and labels, summed over them."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    sums: Counter[str] = Counter()
    for name, value in re.findall(r"^(tierstore_reactor_\w+_total\S*) (\S+)$", text, flags=re.MULTILINE):
        sums[re.sub(r'reactor="\d+",?', "", name).removesuffix("{}")] += float(value)
    return sums


def ask(
    server: ServerThread, url: str, name: str, client: look_ups.Client, work: Path, behind: str = ""
) -> tuple[int, Counter[str]]:
    """How many look-ups a client has sent, all answered right, and what the service has counted meanwhile."""
    sent, before = asked(behind), counted(server)
    answers = client(url, sent, work)
    assert len(answers) == len(sent)
    for look_up, answer in zip(sent, answers, strict=True):
        known = look_up.keys >= 0
        values = np.where(known, look_up.keys, UNKNOWN).astype(np.float32)
        np.testing.assert_array_equal(answer.rows, values[:, None] * SHAPE_OF_ROW)
        np.testing.assert_array_equal(answer.found, known)
        assert (answer.id or None) == (None if name in look_ups.SENDS_NO_ID else look_up.id or None)
    return len(sent), counted(server) - before


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["directly", *proxies.PROXIES])
@pytest.mark.parametrize("client", look_ups.CLIENTS)
def test_look_ups_of_any_size_and_id_are_answered_without_python(
    server: ServerThread, url_of: Callable[[str], str], work: Path, client: str, way: str
) -> None:
    sent, counts = ask(server, url_of(way), client, look_ups.CLIENTS[client], work)
    assert counts["tierstore_reactor_answers_total"] >= sent - FIRST, dict(counts)


@pytest.mark.parametrize("way", proxies.OF_HTTP2)
def test_look_ups_whose_http2_ends_at_a_proxy_are_answered_without_python(
    server: ServerThread, url_of: Callable[[str], str], work: Path, way: str
) -> None:
    def client(url: str, asked: list[look_ups.LookUp], work: Path) -> list[look_ups.Answer]:
        """A process for each: curl 7.88 cannot ask again on such a connection."""
        return [look_ups.curl(url, [one], work, "--http2-prior-knowledge")[0] for one in asked]

    sent, counts = ask(server, url_of(way), "curl", client, work)
    assert counts["tierstore_reactor_answers_total"] >= sent - FIRST, dict(counts)


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["directly", *proxies.PROXIES])
@pytest.mark.parametrize("client", look_ups.LEFT_TO_PYTHON)
def test_look_ups_that_are_left_to_python_are_answered_the_same(
    server: ServerThread, url_of: Callable[[str], str], work: Path, client: str, way: str
) -> None:
    ask(server, url_of(way), client, look_ups.LEFT_TO_PYTHON[client], work)


@pytest.mark.thorough
@pytest.mark.parametrize("client", sorted({*look_ups.CLIENTS} - {*look_ups.SENDS_NO_ID}))
def test_ids_of_other_letters_come_back(server: ServerThread, work: Path, client: str) -> None:
    """As they are, or as escapes, which are left to Python: clients write them the one way or the other."""
    ask(server, server.url, client, look_ups.CLIENTS[client], work, behind=" λ😀")
