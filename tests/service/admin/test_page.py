"""The status page in a real browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest

from tierstore.service.admin import pages
from tierstore.service.admin.pages import STATUS_PAGE
from tierstore.service.server import ServerThread
from tierstore.service.sources.kafka_rows_status import RowStats
from tierstore.service.sources.kafka_status import KafkaStats

ADMIN = Path(pages.__file__).parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=5000",
]


def in_browser(url: str, tmp_path: Path) -> str:
    """The document that a page has become after some seconds."""
    command = [str(CHROMIUM), *QUIET, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; on Debian: apt-get install chromium")
def test_the_page_shows_models_versions_and_tables(server: ServerThread, http: httpx.Client, tmp_path: Path):
    keys = {"name": "item_id", "datatype": "INT64", "shape": [2], "data": [1, 2]}
    assert http.post("/v2/models/ctr/infer", json={"inputs": [keys]}).status_code == 200
    shown = in_browser(server.url + "/", tmp_path)
    for words in ("ready", "ctr", "active", "float32", "host budget"):
        assert words in shown, words


@pytest.mark.parametrize("page", ["/", "/docs"])
def test_no_page_needs_another_host(http: httpx.Client, page: str) -> None:
    answer = http.get(page)
    assert answer.status_code == 200
    references = re.findall(r"(?:src|href|action|data|poster)\s*=\s*[\"']?([^\"'\s>]+)", answer.text)
    references += re.findall(r"(?:url\(|@import|import\s*\(|fetch\()\s*[\"']?([^\"'\s)]+)", answer.text)
    assert references
    assert [place for place in references if not re.match(r"/(?!/)|data:,|#", place)] == []
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; "), "a browser loads nothing but what follows"
    assert not re.search(r"https?:|\*|//", policy)


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


MEASURE = """<script>
let asked=0;
window.fetch=async()=>{{const d={document};const n=100*asked++;d.service.request_seconds.counts[4]+=n;d.service.request_seconds.failed+=asked>1?7:0;
return {{ok:true,json:async()=>d}}}};
setTimeout(()=>{{const wide=[...document.querySelectorAll("main *")].filter(e=>e.getBoundingClientRect().right>innerWidth+1);
document.title=`${{innerWidth}} ${{document.documentElement.scrollWidth}} ${{wide.length}} ${{document.querySelectorAll("td").length}}|`+
[...document.querySelectorAll(".tile")].map(e=>e.innerText.replace("\\n",": ")).join("; ")+"|"+
[...document.querySelectorAll(".card")].map(e=>e.innerText).join("; ").replaceAll("|"," ")}},2500);
</script>"""


def everything(document: dict[str, Any]) -> dict[str, Any]:
    """The status of a node that has one of each: a cluster, every kind of source, background work, problems."""
    kafka = KafkaStats("embeddings")
    kafka.connected()
    kafka.read(int(1000 * (time.time() - 300)))
    kafka.place({0: 1200, 1: 7}, {0: 34})
    kafka.update(None, False, False, {"ctr": "delta 41822 is missing"})
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
        "problems": ["the certificate cannot be read"],
    }
    (ctr, *others) = sorted(document["models"], key=lambda model: model["model"] != "ctr")
    ctr |= {
        "remote": {"reachable": False, "problem": "no answer from 10.0.0.7", "seq": 41821, "ingester": True},
        "damaged": {"17": "its record makes no sense"},
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
    return document | {"models": [ctr, *others], "service": service, "throttle": throttle, "remote": cluster}


def shown_at(width: int, document: dict[str, Any], tmp_path: Path) -> tuple[list[int], str, str]:
    """In a frame of that width (a window of Chromium's is never narrower than 500), after two polls.

    (width inside, width with what lies beyond, elements beyond the edge, cells), the tiles' words and the cards'.
    """
    measure = MEASURE.format(document=json.dumps(document).replace("</", "<\\/"))
    (tmp_path / "page.html").write_text(STATUS_PAGE.replace("<style>", measure + "<style>", 1))
    (tmp_path / "frame.html").write_text(
        f'<iframe id="f" src="page.html" width="{width}" height="900" frameborder="0"></iframe>'
        '<script>setTimeout(()=>{document.title=document.getElementById("f").contentDocument.title},4000)</script>'
    )
    flags = [*QUIET, "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    shown = subprocess.run(
        [str(CHROMIUM), *flags, (tmp_path / "frame.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    measured, tiles, cards = html.unescape(re.findall(r"<title>(.*?)</title>", shown, re.DOTALL)[0]).split("|")
    return [int(number) for number in measured.split()], tiles, cards


@pytest.mark.thorough
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; on Debian: apt-get install chromium")
@pytest.mark.parametrize("width", [320, 360, 1200])
def test_nothing_of_the_page_lies_beyond_its_edge(http: httpx.Client, tmp_path: Path, width: int):
    measured, tiles, _ = shown_at(width, http.get("/admin/models").json(), tmp_path)
    inner, scrolled, beyond, cells = measured
    assert inner == width
    assert (scrolled <= inner, beyond) == (True, 0)
    assert cells > 10
    # between the two polls: 100 requests of 1 to 2.5 ms, of which 7 failed
    for words in (
        "1.75 ms: p50, last minute",
        "2.49 ms: p99, last minute",
        "7 (7.0 %): errors, last minute",
        "at most 2.49 ms",
        "none: background work",
        "open: access",
    ):
        assert words in tiles, tiles


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; on Debian: apt-get install chromium")
@pytest.mark.parametrize("width", [320, 1200])
def test_the_page_shows_the_cluster_and_every_source_and_what_is_wrong(
    http: httpx.Client, tmp_path: Path, width: int
) -> None:
    measured, tiles, cards = shown_at(width, everything(http.get("/admin/models").json()), tmp_path)
    inner, scrolled, beyond, _ = measured
    assert (scrolled <= inner, beyond) == (True, 0)
    for words in (
        "held up: Kafka, 34 messages behind",
        "25.0 %: of the time for load",
        "reachable: cluster h1:6379,h2:6379",
        "by token: access, TLS",
    ):
        assert words in tiles, tiles
    for words in (
        "the certificate cannot be read",
        "rows are in a cluster, at delta 41,821; this node brings deltas into them",
        "the cluster: no answer from 10.0.0.7",
        "version 17 is damaged",
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
        "What the words mean",
    ):
        assert words in cards, cards


def test_every_file_of_the_pages_is_in_the_package() -> None:
    """As package data: a wheel has no other files than modules."""
    root = Path(__file__).parents[3]
    data = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    shipped = {path for pattern in data["tierstore.service.admin"] for path in ADMIN.glob(pattern)}
    referenced = re.findall(r'(?:href|src)="(\w+\.(?:css|js))"', "".join(page.read_text() for page in shipped))
    assert {ADMIN / "static" / name for name in referenced} <= shipped
    assert {path for path in ADMIN.rglob("*.*") if path.suffix in (".html", ".css", ".js")} == shipped
