"""The page of a plan, and what a service measures beside it."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tierstore.sizing.outlook import growth, sensitivity
from tierstore.sizing.page import page
from tierstore.sizing.plan import Load, Machine, plan
from tierstore.sizing.prices import Kind, Prices
from tierstore.sizing.reuse import ADS, Zipf
from tierstore.sizing.served import Compared, ServedTraffic, compare
from tierstore.types import StorageDtype

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
GIB = 1 << 30
VOID = {"meta", "link", "br"}
KIND = Kind(memory="256GiB", disk="8TiB", cores=32, price=1900)  # type: ignore[arg-type]


def made_page(**prices: object) -> str:
    machine = Machine(memory=256 * GIB, disk=8000 * GIB)
    made = plan(Load(1e10, 32, StorageDtype("float16"), qps=20_000), machine, prices=Prices(**prices))  # type: ignore[arg-type]
    compared = [Compared("hit rate", "%", 0.9, 0.875), Compared("processor of a request", "µs", 20e-6, None)]
    return page(made, sensitivity(made, machine), growth(made, machine, 0.05), compared, "Sizing of ctr/item")


class Tags(HTMLParser):
    """Whether each element is closed, in order; and all attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.figures = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        self.figures += tag == "svg"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_but_itself() -> None:
    text = made_page(currency="EUR")
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.figures == 4
    assert {name for name, _ in tags.attributes} & {"src", "href", "data", "srcset", "style"} == set()
    assert not re.search(r"url\(|@import|https?:|<script", text)
    assert "prefers-color-scheme: dark" in text
    for words in (
        "partitions",
        "copies",
        "EUR",
        "in month",
        "87.5%",
        "20.0 µs",
        "Sizing of ctr/item",
        "--upstream",
    ):
        assert words in text, words
    for number in re.findall(r' (?:x|y|width|height|cx|cy|x1|y1|x2|y2)="([^"]*)"', text):
        assert 0 <= float(number) <= 1000, number


def test_names_are_no_markup() -> None:
    text = made_page(currency="<b>&", nodes={"<script>alert(1)</script>": KIND})
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "&lt;b&gt;&amp;" in text


def test_a_page_of_what_nobody_can_serve() -> None:
    made = plan(Load(1e13, 64, StorageDtype("float32")), Machine(memory=1 * GIB))
    text = page(made, sensitivity(made, Machine(memory=1 * GIB)))
    assert "No design can serve this" in text
    assert "<svg" not in text


@pytest.mark.thorough
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; on Debian: apt-get install chromium")
@pytest.mark.parametrize("width", [500, 1200])
def test_nothing_of_the_page_lies_beyond_its_edge(tmp_path: Path, width: int) -> None:
    measure = "<script>document.title = [innerWidth, document.documentElement.scrollWidth].join()</script></body>"
    (tmp_path / "page.html").write_text(made_page(currency="EUR").replace("</body>", measure))
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},900", "--dump-dom", f"file://{tmp_path / 'page.html'}",
    ]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search(r"<title>(\d+),(\d+)</title>", shown)
    assert found is not None, shown[:200]
    assert int(found[1]) == width
    assert int(found[2]) <= width


BEFORE = """# HELP process_cpu_seconds_total Total user and system CPU time spent in seconds.
process_cpu_seconds_total 10.5
tierstore_request_seconds_count{outcome="ok",protocol="oip_http"} 100.0
tierstore_request_seconds_count{outcome="bad_input",protocol="oip_http"} 7.0
tierstore_request_seconds_count{outcome="ok",protocol="admin"} 50.0
tierstore_request_seconds_sum{outcome="ok",protocol="oip_http"} 1.0
tierstore_lookup_keys_total{model="ctr",table="item",tier="host"} 1000.0
"""
AFTER = """process_cpu_seconds_total 12.5
tierstore_request_seconds_count{outcome="ok",protocol="oip_http"} 900.0
tierstore_request_seconds_count{outcome="ok",protocol="oip_grpc"} 200.0
tierstore_request_seconds_count{outcome="bad_input",protocol="oip_http"} 70.0
tierstore_request_seconds_count{outcome="ok",protocol="admin"} 500.0
tierstore_lookup_keys_total{model="ctr",table="item",tier="host"} 91000.0
tierstore_lookup_keys_total{model="ctr",table="user",tier="host"} 9000.0
tierstore_lookup_keys_total{model="ctr",table="user",tier="disk"} 1000.0
"""


def test_what_a_service_did_between_two_looks() -> None:
    traffic = ServedTraffic.between(BEFORE, AFTER, 4.0)
    assert (traffic.cpu_s, traffic.requests) == (2.0, 1000.0)
    assert traffic.keys == {"host": 99_000.0, "disk": 1000.0}


def test_the_plan_beside_what_is_measured_by_hand() -> None:
    traffic = ServedTraffic.between(BEFORE, AFTER, 4.0)
    entry = {
        "rows": 1000, "lookup_keys": {"overlay": 5, "host": 80, "absent": 5, "disk": 10},
        "host": {"rows": 500}, "tier_bytes": {"host": 39_000, "disk": 80_000},
    }  # fmt: skip
    found = {one.what: one for one in compare(Load(1000, 32, StorageDtype("float16"), Zipf(0)), entry, traffic, ADS)}
    assert found["hit rate"].measured == pytest.approx(0.9)
    # all rows alike, half of them in memory, and the policy's loss
    assert found["hit rate"].planned == pytest.approx(0.5, abs=0.1)
    assert found["memory of a row in memory"].planned == pytest.approx(64 + 13.71, abs=0.01)
    assert found["memory of a row in memory"].measured == 78
    assert found["disk of a row"].measured == 80
    # 1,000 requests: 100 keys each, one of them from disk
    assert found["processor of a request"].planned == pytest.approx((15 + 100 * 0.07 + 7) * 1e-6)
    assert found["processor of a request"].measured == pytest.approx(2e-3)
    assert found["requests a second"].measured == 250
    assert found["keys of a request"].measured == 100
    nothing = compare(Load(1000, 32, StorageDtype("float16")), entry, ServedTraffic(1.0, 0.0, 0.0, {}), ADS)
    assert {one.what: one.shown(one.measured) for one in nothing}["processor of a request"] == "–"
