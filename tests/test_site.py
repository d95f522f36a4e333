"""The documentation site that `make site` builds: whole, searched in a real browser without a network, as the pages are on a forge."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
THE_BROWSERS_OWN = (
    ".google.com",
    ".googleapis.com",
    ".gvt1.com",
    ".gstatic.com",
)  # hosts: pages are searched for them below
BROWSER = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("mkdocs") is None or find_spec("material") is None or find_spec("mkdocstrings") is None:
        pytest.skip("MkDocs is not installed: make site-tools")
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "tools.site", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert (done.returncode, done.stdout + done.stderr) == (0, ""), "links, anchors and docstrings give no warning"
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("term", "page"), [("withdraw", "docs/versions.html"), ("lookup_bags", "reference/python.html")]
)
def test_the_search_finds_a_term_from_a_disk_and_asks_nobody(site: Path, tmp_path: Path, term: str, page: str) -> None:
    if CHROMIUM is None:
        pytest.skip("no Chromium here; on Debian: apt-get install chromium")
    log = tmp_path / "net.json"
    options = [f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}", "--virtual-time-budget=15000"]
    command = [CHROMIUM, *BROWSER, *options, "--dump-dom", f"{site.as_uri()}/index.html?q={term}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    results = re.findall(
        r'class="md-search-result__link"[^>]*href="([^"]+)"|href="([^"]+)"[^>]*class="md-search-result__link"', shown
    )
    found = {(first or second).removeprefix(site.as_uri() + "/").partition("?")[0] for first, second in results}
    assert page in found
    asked = set(re.findall(r'"url":"https?://([^/"]+)', log.read_text()))
    assert {host for host in asked if not host.endswith(THE_BROWSERS_OWN)} == set()


@pytest.mark.thorough
def test_no_page_needs_another_host(site: Path) -> None:
    pages, styles = list(site.rglob("*.html")), list(site.rglob("*.css"))
    assert len(pages) > 100
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|link|img|iframe|source|use)\b[^>]*?\b(?:src|href)=[\"']?([^\"'\s>]+)", text)
        assert loaded
        assert [place for place in loaded if re.match(r"[a-z]+:|//", place) and not place.startswith("data:")] == [], (
            page
        )
    for style in styles:
        urls = re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')]+)", style.read_text(encoding="utf-8"))
        assert [url for url in urls if re.match(r"https?:|//", url)] == [], style


@pytest.mark.thorough
def test_pages_have_the_parts_that_they_have_on_a_forge(site: Path) -> None:
    """Python-Markdown, which MkDocs renders with, is stricter with lists than CommonMark: it wants a blank line before, and four spaces."""
    forge = MarkdownIt("commonmark", {"html": True}).enable("table").enable("strikethrough")

    def parts(html: str) -> list[str]:
        html = re.sub(r'<a class="headerlink".*?</a>', "", html, flags=re.DOTALL)
        html = re.sub(r"(<pre>|<code).*?(</pre>|</code>)", r"\1\2", html, flags=re.DOTALL)
        return re.findall(r"<(/?(?:ul|ol|li|table|tr|td|a|em|strong|h[1-6])|pre)\b", html)

    source = site.with_name("site.pages") / "pages"
    pages = [page for page in sorted(source.rglob("*.md")) if page != source / "reference/python.md"]
    assert len(pages) > 100
    differ = {}
    for page in pages:
        text = re.sub(r"\A---\n.*?\n---\n", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        name = "index" if page.stem == "README" else page.stem
        made = (site / page.relative_to(source)).with_name(f"{name}.html").read_text(encoding="utf-8")
        article = re.sub(r".*<article[^>]*>|</article>.*", "", made, flags=re.DOTALL)
        both = zip_longest(parts(article), parts(forge.render(text)))
        if at := [i for i, (here, there) in enumerate(both) if here != there]:
            differ[str(page.relative_to(source))] = at[0]
    assert differ == {}


def test_the_page_of_metrics_is_up_to_date() -> None:
    from tools.make_metrics_page import PAGE, page

    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tools.make_metrics_page"
