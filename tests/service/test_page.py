"""The status page in a real browser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

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
