"""The status page in a real browser: what it shows, how it fits, what it changes, and what other pages cannot."""

from __future__ import annotations

import http.server
import re
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from tests.service.admin.browser import CHROMIUM, Page, browser
from tests.service.conftest import GRPC, settings_for
from tests.service.scenes import delta, write_snapshot
from tierstore.access.roles import Role
from tierstore.access.tokens import TokenFile
from tierstore.engine.store import Store
from tierstore.service.admin import pages
from tierstore.service.history import STEP_S
from tierstore.service.server import ServerThread
from tierstore.service.sources.kafka_rows_status import RowStats
from tierstore.service.sources.kafka_status import KafkaStats
from tierstore.service.stats import Timings

ADMIN = Path(pages.__file__).parent
with_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; on Debian: apt-get install chromium")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Page]]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@contextmanager
def serving(root: Path) -> Iterator[tuple[Store, ServerThread]]:
    """A service of its own, with versions 1, 2 and 3 of `ctr`, of which 3 is active, and some minutes behind it."""
    with Store(settings_for(root, grpc_port=GRPC, keep_versions=3)) as store, ServerThread(store) as server:
        for version in (1, 2, 3):
            store.load_snapshot(write_snapshot(root, version, shift=100.0 * version))
        store.shared.sampler.close()
        history, began_s = server.service.history, time.time() - 20 * STEP_S
        for step in range(20):
            store.model("ctr").lookup("item_id", np.arange(90, 110))
            server.service.inference_stats.succeeded("ctr", 3, 1_000_000, Timings())
            if step % 4 == 0:
                store.apply_delta(delta(step // 4 + 1, {1: float(step)}))
            history.time_passed(began_s + STEP_S * step)
        yield store, server


@with_browser
def test_the_page_shows_models_versions_and_tables(
    server: ServerThread, http: httpx.Client, tab: Callable[[], Page]
) -> None:
    keys = {"name": "item_id", "datatype": "INT64", "shape": [2], "data": [1, 2]}
    assert http.post("/v2/models/ctr/infer", json={"inputs": [keys]}).status_code == 200
    page = tab()
    page.open(server.url + "/")
    for words in ("ready", "ctr", "active", "float32", "memory for rows"):
        page.wait_text(words)
    assert page.errors == []


@pytest.mark.parametrize("page", ["/", "/docs"])
def test_no_page_needs_another_host(http: httpx.Client, page: str) -> None:
    answer = http.get(page)
    assert answer.status_code == 200
    references = re.findall(r"\b(?:src|href|action|data|poster)=[\"']?([^\"'\s>]+)", answer.text)
    references += re.findall(r"(?:url\(|@import|import\s*\(|fetch\()\s*[\"']([^\"']+)", answer.text)
    assert references
    assert [place for place in references if not re.match(r"/(?!/)|data:,|#", place)] == []
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; "), "a browser loads nothing but what follows"
    assert not re.search(r"https?:|\*|//[a-z]|unsafe", policy)


def test_the_docs_have_every_request(http: httpx.Client) -> None:
    page = http.get("/docs").text
    document = http.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method in operations:
            assert f"{method.upper()} {path}</code>" in page
    for words in ("share", "number", "by default 0.05", "-d &#x27;{&quot;version&quot;: 20261121", "@FILE"):
        assert words in page, words
    assert "<script" not in page
    assert http.get("/redoc").status_code == 404


def everything(document: dict[str, Any]) -> dict[str, Any]:
    """The status of a node that has one of each: a cluster, every kind of source, background work, problems."""
    kafka = KafkaStats("embeddings")
    kafka.connected()
    kafka.read(int(1000 * (time.time() - 300)))
    kafka.place({0: 1200, 1: 7}, {0: 34})
    reader: Any = SimpleNamespace(standing=lambda: None, problem=None, at_end=False)
    kafka.update(reader, False, {"ctr": "delta 41822 is missing"})
    kafka.applied = 41
    name = "s3://a-bucket-with-a-long-name/snapshots/of/every/model/that/there/is"
    location = {"location": name, "state": "cannot be read", "looked_at": 1.0, "snapshots": 3, "problems": ["denied"]}
    watched = {"seen": 2, "pending": 3, "canary": None, "last": "version 2 is active", "problem": None}
    service = document["service"] | {
        "kafka": kafka.status(parked=2),
        "kafka_rows": {"topics": {"vectors": RowStats("vectors").status(parked=1)}},
        "watch": {"directory": "/deltas", "applied": 9, "problem": None, "held_up": {"ctr": "8.arrow is no delta"}},
        "watch_snapshots": {"locations": [location], "models": {"ctr": watched}, "problems": []},
        "access": {"tokens": True, "tls": True},
        "last_minute": document["service"]["last_minute"]
        | {"at_s": 1, "seconds": 60, "requests": 120, "failed": 7, "p50_s": 0.00175, "p99_s": 0.0025},
    }
    (ctr, *others) = sorted(document["models"], key=lambda model: model["model"] != "ctr")
    ctr |= {
        "remote": {"reachable": False, "problem": "no answer from 10.0.0.7", "seq": 41821, "ingester": True},
        "last_event_time": "2026-11-20T02:00:00Z",
        "delta_age_s": 7300.0,
        "fresh": False,
        "dense": {"runs": 1234, "failed": 5, "seconds": 1.0},
    }
    rates = {0.25: None, 0.5: 0.78, 1.0: 0.831, 2.0: 0.862}
    curve = [{"scale": scale, "rows": int(1000 * scale), "hit_rate": rate} for scale, rate in rates.items()]
    next(iter(ctr["tables"].values()))["cache"] = {"rows": 1000, "hit_rate": 0.83, "curve": curve, "bytes": 1}
    cluster = {"node": "a", "cluster": "h1:6379,h2:6379", "reachable": True, "problem": None}
    throttle = document["throttle"] | {"work": ["load"], "share": 0.25}
    problems = [
        {"model": "", "kind": "certificate", "text": "the certificate cannot be read"},
        {"model": "ctr", "kind": "version_damaged", "text": "version 17: its record makes no sense"},
    ]
    more = {"throttle": throttle, "remote": cluster, "problems": problems}
    return document | {"models": [ctr, *others], "service": service, **more}


WIDE = 26  # tables


def wide(document: dict[str, Any]) -> dict[str, Any]:
    """The status with one more model, of so many tables and features."""
    (ctr,) = (model for model in document["models"] if model["model"] == "ctr")
    entry = ctr["tables"]["item"]
    names = [f"a_feature_with_a_long_name_{number:02d}" for number in range(WIDE)]
    ranker = ctr | {
        "model": "ranker",
        "tables": dict.fromkeys(names, entry),
        "features": {name: {"table": name, "combiner": None} for name in names},
    }
    return document | {"models": [ctr, ranker]}


BEYOND = """(() => {
  const far = [...document.querySelectorAll("body *")].filter(one => one.getBoundingClientRect().right > innerWidth + 1);
  return [innerWidth, document.documentElement.scrollWidth, far.map(one => one.outerHTML.slice(0, 100))];
})()"""


def fits(page: Page, width: int) -> None:
    inner, scrolled, beyond = page.evaluate(BEYOND)
    assert (inner, scrolled, beyond) == (width, width, [])


def open_with(page: Page, server: ServerThread, document: dict[str, Any], **others: Any) -> None:
    """Open the page with that status in place of the service's; `others` by the ends of their paths."""

    def answer(url: str) -> Any:
        path = url.split("?")[0]
        if path.endswith("/admin/models"):
            return document
        return next((other for end, other in others.items() if path.endswith(f"/{end}")), None)

    page.answer_with(answer)
    page.open(server.url + "/")
    page.wait("document.querySelectorAll('#models section').length > 1")


def hour() -> dict[str, Any]:
    """A whole hour: a switch and a rollback in it, a time of errors, and one without requests."""
    count = 240
    at_s = [int(time.time()) // STEP_S * STEP_S - STEP_S * (count - 1 - step) for step in range(count)]
    quiet = range(100, 110)
    steps = {
        "at_s": at_s, "seconds": [STEP_S] * count,
        "requests": [0 if i in quiet else 1500 for i in range(count)],
        "failed": [45 if 60 <= i < 64 else 0 for i in range(count)],
        "keys": [0 if i in quiet else 3000 for i in range(count)], "read": [0 if i in quiet else 300 for i in range(count)],
        "absent": [0 if i in quiet else 1000 for i in range(count)], "deltas": [i % 4 == 0 for i in range(count)],
        "version": [2 if 80 <= i < 130 else 1 for i in range(count)], "seq": [i // 4 for i in range(count)],
        "p50_s": [None if i in quiet else 0.0004 for i in range(count)], "p99_s": [None if i in quiet else 0.002 + 0.00001 * i for i in range(count)],
    }  # fmt: skip
    whole = {name: sum(steps[name]) for name in ("requests", "failed", "keys", "read", "absent", "deltas")}
    changes = [
        {"at_s": at_s[i] + 0.5, "what": what, "outcome": outcome, **more}
        for i, what, outcome, more in (
            (200, "canary", "failed", {"version": 9, "error": "no version 9 of a model whose name goes on and on"}),
            (130, "rollback", "done", {"active_before": 2, "active_after": 1, "who": "token 5f0c8e21ab34 at 10.0.0.7"}),
            (80, "load", "done", {"version": 2, "active_before": 1, "active_after": 2}),
            *((i, "label", "done", {"version": 1, "label": "best"}) for i in range(20, 10, -1)),
        )
    ]
    return {
        "step_s": STEP_S,
        "minute": {"seconds": 60, **{name: sum(steps[name][-4:]) for name in whole}, "p50_s": 0.0004, "p99_s": 0.004},
        "hour": {"seconds": 3600, **whole, "p50_s": 0.0004, "p99_s": 0.004},
        "steps": steps,
        "versions": [],
        "versions_since_s": None,
        "changes": changes,
    }


@with_browser
@pytest.mark.thorough
@pytest.mark.parametrize("width", [320, 360, 1200])
def test_nothing_of_the_page_lies_beyond_its_edge(
    server: ServerThread, http: httpx.Client, tab: Callable[[], Page], width: int
) -> None:
    page = tab()
    page.size(width, dark=width == 360)
    open_with(page, server, wide(http.get("/admin/models").json()), history=hour())
    page.wait_text(
        "the last hour: 345,000 requests · p50 0.40 ms · p99 4.0 ms · 180 errors (0.05 %) · 90.0 % from memory · 60 deltas"
    )
    fits(page, width)
    tables = "[data-fold='tables ranker']"
    assert page.evaluate(f'document.querySelector("{tables}").open') is False, "so many tables are folded away"
    assert page.text(f"{tables} > summary").startswith(f"{WIDE} tables · ")
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    page.wait("document.querySelectorAll(\"[data-fold='inputs ranker'] td\").length > 100")
    fits(page, width)
    page.wait_text("8 earlier changes")
    assert page.errors == []
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(245, 246, 248)") is (width != 360), background


@with_browser
@pytest.mark.thorough
@pytest.mark.parametrize("width", [320, 1200])
def test_the_page_shows_the_cluster_and_every_source_and_what_is_wrong(
    server: ServerThread, http: httpx.Client, tab: Callable[[], Page], width: int
) -> None:
    page = tab()
    page.size(width)
    open_with(page, server, everything(http.get("/admin/models").json()))
    fits(page, width)
    tiles, cards = page.text("#headline") + page.text("#tiles"), page.text("#models")
    for words in (
        "Kafka\nheld up\n34 messages behind",
        "background work\nload\n25.0 % of the time",
        "cluster\nreachable\nh1:6379,h2:6379",
        "access\nby token\nover TLS",
        "requests a second\n2.0\n7 errors (5.8 %)",
        "p99\n2.5 ms\np50 1.8 ms",
        "newest event\n2 h ago\nctr, later than freshness_max_s allows",
    ):
        assert words in tiles, tiles
    for words in (
        "certificate the certificate cannot be read",
        "ctr: version damaged version 17: its record makes no sense",
        "rows are in a cluster, at delta 41,821; this node brings deltas into them",
        "the cluster is not reachable",
        "newest event 2 h ago, later than freshness_max_s allows",
        "1,234 runs, 5 of them failed",
        "Kafka topic embeddings",
        "41 deltas",
        "rows of Kafka topic vectors",
        "34 messages, 5 min",
        "2 messages parked",
        "delta 41822 is missing",
        "8.arrow is no delta",
        "denied",
        "version 3 waits",
        "half −5.1 · twice +3.1",
    ):
        assert words in cards, cards
    assert page.evaluate("document.title") == "(2) tierstore"


# --- what a reader of the page does


@pytest.fixture
def own_page(tmp_path: Path, tab: Callable[[], Page]) -> Iterator[tuple[Store, ServerThread, Page]]:
    with serving(tmp_path) as (store, server):
        page = tab()
        page.size(1200)
        page.open(server.url + "/")
        page.wait_text("Roll back to 2")
        page.wait("document.querySelector('.hour')")  # nothing moves any more
        yield store, server, page


@with_browser
@pytest.mark.thorough
def test_versions_are_switched_by_the_keyboard_alone(own_page: tuple[Store, ServerThread, Page]) -> None:
    store, _, page = own_page
    page.evaluate("document.querySelector('[data-action=rollback]').focus()")
    page.key("Enter", "\r")
    page.wait_text("From version 3 to version 2", "#ask")
    page.key("Escape")
    page.wait("!document.querySelector('#ask').open")
    assert store.model("ctr").active_version == 3, "to close the dialog changes nothing"
    assert page.evaluate("document.activeElement.dataset.action") == "rollback", "the focus is back where it was"
    page.key("Enter", "\r")
    page.wait("document.querySelector('#ask').open")
    page.key("Tab")  # from Cancel
    assert page.evaluate("document.activeElement.id") == "go"
    page.key("Enter", "\r")
    page.wait_text("done, version 2 is active", "#said")
    assert store.model("ctr").active_version == 2
    page.wait_text("rollback: 3 → 2", ".changes")
    page.evaluate("document.querySelector('[data-action=activate][data-version=\"3\"]').focus()")
    page.key("Enter", "\r")
    page.wait("document.querySelector('#ask').open")
    page.key("Tab")
    page.key("Enter", "\r")
    page.wait_text("done, version 3 is active", "#said")
    assert page.errors == []


@with_browser
@pytest.mark.thorough
def test_a_canary_gets_its_share_and_is_promoted_or_withdrawn(own_page: tuple[Store, ServerThread, Page]) -> None:
    store, _, page = own_page
    page.click("[data-action=canary][data-version='2']")
    page.evaluate("document.querySelector('#share').value = ''; document.querySelector('#share').focus()")
    page.type("12.5")
    page.click("#go")
    page.wait_text("canary 2 at 12.5 %")
    served = store.model("ctr").served
    assert (served.canary.version, served.share) == (2, 0.125)
    page.click("[data-action=withdraw]")
    page.click("#go")
    page.wait("!document.querySelector('[data-action=withdraw]')")
    assert store.model("ctr").served.canary is None
    store.canary("ctr", 1)
    page.click("[data-action=promote]")
    page.click("#go")
    page.wait_text("done, version 1 is active", "#said")
    assert page.errors == []


@with_browser
@pytest.mark.thorough
def test_a_page_that_is_behind_rolls_back_once(own_page: tuple[Store, ServerThread, Page]) -> None:
    store, _, page = own_page
    page.click("[data-action=rollback]")
    store.rollback("ctr")  # by somebody else, while the question stands
    page.click("#go")
    page.wait("document.querySelector('#said').className === 'problem'")
    assert store.model("ctr").active_version == 2
    assert "expected version 3 to be active, got 2" in page.text("#said")


@with_browser
@pytest.mark.thorough
def test_keys_are_explained_whole_and_what_is_typed_outlasts_a_poll(own_page: tuple[Store, ServerThread, Page]) -> None:
    _, _, page = own_page
    page.click("[data-fold='explain ctr'] > summary")
    page.wait("document.querySelector(\"[data-fold='explain ctr']\").open")
    page.evaluate("document.querySelector('.explain input').focus()")
    page.type("1 9223372036854775807 -77")  # 2**63 - 1 is there; a number of the browser's would be another
    polls = "performance.getEntriesByType('resource').filter(one => one.name.endsWith('/admin/models')).length"
    before = page.evaluate(polls)
    page.wait(f"{polls} > {before}")
    assert page.evaluate("document.activeElement.value") == "1 9223372036854775807 -77"
    page.key("Enter", "\r")
    page.wait("document.querySelectorAll('.explained').length === 3")
    of_delta, last, absent = page.evaluate("[...document.querySelectorAll('.explained')].map(one => one.innerText)")
    assert "1 present" in of_delta
    assert "delta 5" in of_delta
    assert "9223372036854775807 present" in last
    assert "-77 never there" in absent
    assert "-1, -2, -3, -4 (the default)" in absent
    page.evaluate("document.querySelector('.explain input').value = '1.5'")
    page.click(".explain button")
    page.wait_text("expected keys that are whole numbers, with spaces between them, got “1.5”")
    page.evaluate(
        "document.querySelector('.explain select').value = 'user'; document.querySelector('.explain input').value = 'u7'"
    )
    page.click(".explain button")
    page.wait_text("u7 present", ".explained")
    assert page.errors == []


@with_browser
@pytest.mark.thorough
def test_the_hour_is_walked_through_by_arrow_keys_and_by_pointing(own_page: tuple[Store, ServerThread, Page]) -> None:
    _, _, page = own_page
    page.wait("document.querySelector('.hour')")
    page.evaluate("document.querySelector('.hour').focus()")
    for key in ("Home", "ArrowRight"):
        page.key(key)
    steps = page.evaluate("fetch('/admin/models/ctr/history').then(answer => answer.json())")["steps"]
    page.wait_text("1 delta, up to 1" if steps["deltas"][1] else f"0 deltas, up to {steps['seq'][1]}", ".hour")
    assert "15 s up to" in page.text(".hour output")
    page.key("Escape")
    page.wait("document.querySelector('.hour output').innerText === 'the last minute'")
    page.point(".chart svg", 0.999)
    page.wait("document.querySelector('.cursor')")
    assert page.errors == []


# --- tokens


@with_browser
@pytest.mark.thorough
def test_a_token_is_asked_for_kept_in_memory_alone_and_lets_no_reader_change_anything(
    tmp_path: Path, tab: Callable[[], Page]
) -> None:
    settings = settings_for(tmp_path, grpc_port=GRPC)
    held = TokenFile(settings.data / "tokens.json")
    (_, reader), (_, admin) = held.create(Role.READER), held.create(Role.ADMIN)
    with serving(tmp_path) as (_, server):
        page = tab()
        page.open(server.url + "/")

        def use(secret: str) -> None:
            page.wait("!document.querySelector('#access').hidden")
            page.evaluate("document.querySelector('#token').focus()")
            page.type(secret)
            page.key("Enter", "\r")

        page.wait_text("no access")
        assert "ctr" not in page.text()
        use("tierstore_wrong")
        page.wait_text("no access")
        use(reader)
        page.wait_text("token: reader")
        page.wait_text("the last")
        assert page.evaluate("document.querySelectorAll('[data-action]').length") == 0
        page.click("#role")
        use(admin)
        page.wait_text("token: admin")
        page.click("[data-action=rollback]")
        page.click("#go")
        page.wait_text("done, version 2 is active", "#said")
        kept = "[Object.values(localStorage), Object.values(sessionStorage), document.cookie, location.href, document.documentElement.outerHTML].join()"
        assert not any(secret in page.evaluate(kept) for secret in (reader, admin))
        assert page.errors == [text for text in page.errors if "40" in text], "but for refusals"
        page.open(server.url + "/")
        page.wait_text("no access")


@with_browser
@pytest.mark.thorough
def test_where_admin_requests_have_a_listener_of_their_own_the_page_says_so(
    tmp_path: Path, tab: Callable[[], Page]
) -> None:
    settings = settings_for(tmp_path, grpc_port=GRPC, admin_listen="127.0.0.1:0")
    with Store(settings) as store, ServerThread(store) as server:
        page = tab()
        page.open(server.url + "/")
        page.wait_text("admin requests are served on the address of admin_listen alone")
        page.open(server.admin_url + "/")
        page.wait_text("No models yet")


# --- other pages

ATTACK = """
const base = URL;
window.done = (async () => {
  const seen = [];
  for (const [type, body] of [["text/plain", '{"expected_active": 3}'], ["application/json", "{}"], ["", ""], ["application/x-www-form-urlencoded", "a=1"]]) {
    for (const mode of ["no-cors", "cors"]) {
      try {
        const answer = await fetch(base + "/admin/models/ctr/rollback", {method: "POST", mode, credentials: "include", body: type ? new Blob([body], {type}) : undefined});
        seen.push(answer.type + answer.status);
      } catch (error) { seen.push("failed"); }
    }
  }
  for (const enctype of ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]) {
    const form = Object.assign(document.createElement("form"), {method: "post", action: base + "/admin/models/ctr/rollback", enctype, target: "sink"});
    document.body.append(form);
    const ended = new Promise(resolve => document.querySelector("iframe").addEventListener("load", resolve, {once: true}));
    form.submit();
    await ended;
    seen.push("form");
  }
  return seen;
})();
"""


@contextmanager
def other_site(page: str) -> Iterator[str]:
    """A page on another port of this machine; its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        try:
            yield f"http://localhost:{site.server_port}/"
        finally:
            site.shutdown()
            thread.join()


@with_browser
@pytest.mark.thorough
def test_a_page_of_another_site_changes_nothing_where_there_are_no_tokens(
    tmp_path: Path, tab: Callable[[], Page]
) -> None:
    with serving(tmp_path) as (store, server):
        host = server.url.replace("127.0.0.1", "localhost")  # the same site for a browser, but for the port
        for base in (server.url, host):
            attack = f'<body><iframe name="sink"></iframe><script>{ATTACK.replace("URL", repr(base))}</script>'
            with other_site(attack) as url:
                page = tab()
                page.open(url)
                seen = page.evaluate("window.done")
            assert len(seen) == 11, seen
            assert not any("200" in one for one in seen), seen
        assert store.model("ctr").active_version == 3
        refused = [line for line in store.audit.latest(0.0) if line["outcome"] == "refused"]
        assert len(refused) >= 10, "the attempts reached it"
        frame = f'<iframe src="{server.url}/"></iframe>'
        with other_site(frame) as url:
            page = tab()
            page.open(url)
            page.wait("true")
            assert any("frame-ancestors" in text for text in _until(page, lambda: page.errors)), page.errors


def _until(page: Page, found: Callable[[], list[str]]) -> list[str]:
    until = time.monotonic() + 20
    while not found() and time.monotonic() < until:
        page.evaluate("1")
        time.sleep(0.05)
    return found()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:1"}, 403),
    ],
)
def test_what_a_browser_says_of_its_page_decides(http: httpx.Client, headers: dict[str, str], status: int) -> None:
    body = {"feature": "item_id", "keys": [1]}
    assert http.post("/admin/models/ctr/explain", json=body, headers=headers).status_code == status
    if "Origin" not in headers:
        assert http.get("/", headers=headers).status_code == 200, "links to the page lead there from anywhere"


def test_what_a_form_can_send_is_no_json(http: httpx.Client) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        body = b'{"version": 1, "x": "="}'
        answer = http.post("/admin/models/ctr/activate", content=body, headers={"content-type": kind})
        assert answer.status_code == 400, answer.text


@with_browser
def test_the_policy_lets_no_other_script_run(server: ServerThread, tab: Callable[[], Page]) -> None:
    page = tab()
    page.open(server.url + "/")
    page.evaluate(
        "window.hit = 0; document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hit = 1\">')"
    )
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hit = 2'}))"
    )
    assert len(_until(page, lambda: page.errors if len(page.errors) > 1 else [])) > 1
    assert page.evaluate("window.hit") == 0


def test_every_file_of_the_pages_is_in_the_package() -> None:
    """As package data: a wheel has no other files than modules."""
    root = Path(__file__).parents[3]
    data = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    shipped = {path for pattern in data["tierstore.service.admin"] for path in ADMIN.glob(pattern)}
    referenced = re.findall(r'(?:href|src)="(\w+\.(?:css|js))"', "".join(page.read_text() for page in shipped))
    assert {ADMIN / "static" / name for name in referenced} <= shipped
    assert {path for path in ADMIN.rglob("*.*") if path.suffix in (".html", ".css", ".js")} == shipped
