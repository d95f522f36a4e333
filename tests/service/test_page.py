"""The status page in a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from tierstore.service.control.page import STATUS_PAGE
from tierstore.service.server import ServerThread

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


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; on Debian: apt-get install chromium")
def test_the_page_shows_models_versions_and_tables(server: ServerThread, http: httpx.Client, tmp_path: Path):
    keys = {"name": "item_id", "datatype": "INT64", "shape": [2], "data": [1, 2]}
    assert http.post("/v2/models/ctr/infer", json={"inputs": [keys]}).status_code == 200
    shown = subprocess.run(
        [str(CHROMIUM), *QUIET, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", server.url + "/"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    for words in ("ready", "ctr", "active", "float32", "host budget"):
        assert words in shown, words


@pytest.mark.parametrize("page", ["/", "/docs"])
def test_no_page_needs_another_host(http: httpx.Client, page: str) -> None:
    answer = http.get(page)
    assert answer.status_code == 200
    taken = re.findall(r"(?:src|href|action|data|poster)\s*=\s*[\"']?([^\"'\s>]+)", answer.text)
    taken += re.findall(r"(?:url\(|@import|import\s*\(|fetch\()\s*[\"']?([^\"'\s)]+)", answer.text)
    assert taken
    assert [place for place in taken if not re.match(r"/(?!/)|data:,|#", place)] == []
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
[...document.querySelectorAll(".tile")].map(e=>e.innerText.replace("\\n",": ")).join("; ")}},2500);
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; on Debian: apt-get install chromium")
@pytest.mark.parametrize("width", [320, 360, 1200])
def test_nothing_of_the_page_lies_beyond_its_edge(http: httpx.Client, tmp_path: Path, width: int):
    """Measured in a frame of that width: a window of Chromium's is never narrower than 500."""
    document = http.get("/admin/models").text
    (tmp_path / "page.html").write_text(STATUS_PAGE.replace("<style>", MEASURE.format(document=document) + "<style>"))
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
    measured, tiles = re.findall(r"<title>(.*?)</title>", shown)[0].split("|")
    inner, scrolled, beyond, cells = map(int, measured.split())
    assert inner == width
    assert (scrolled <= inner, beyond) == (True, 0)
    assert cells > 10
    # between the two polls: 100 requests of 1 to 2.5 ms, of which 7 failed
    for words in (
        "1.75 ms: p50, last minute",
        "2.49 ms: p99, last minute",
        "7 (7.0 %): errors, last minute",
        "at most 2.49 ms",
    ):
        assert words in tiles, tiles
