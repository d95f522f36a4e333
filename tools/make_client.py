"""Make the blocking client, `Client` and `RemoteModel`, of the source of the awaited one.

    python tools/make_client.py          # writes tierstore/client/sync.py and sync_models.py

A verb is written once, in `aio.py` or `aio_models.py`. Without `async` and `await`, and with the names below, it is the
blocking one. What a sentence says of asyncio alone is replaced whole. Needs `ruff` (extra `dev`).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "tierstore/client"
MADE = {"sync.py": "aio.py", "sync_models.py": "aio_models.py"}
MARK = "<made of>"  # in the docstring of a module, where the source says what is made of it

NAMES = {
    r"async (?=def )": "",
    r"await ": "",
    r"__a(?=(enter|exit)__)": "__",
    r"Async(?=(Client|Iterator|RemoteModel|Transport)\b)": "",
    r"async(?=contextmanager\b)": "",
    r"async_(?=transport\b)": "",
    r"aio_(?=models\b)": "sync_",
}
SENTENCES = {
    "Every verb is to be awaited; `model` and `figures` are not.": "Every verb blocks until it is done.",
    "verbs that have started still end.": "verbs that other threads have started still end.",
    " is served; to be awaited.": " is served.",
    ", for asyncio.": ", for threads.",
    "One client belongs to one event loop; any number of its tasks may share it. A verb that is cancelled closes the\n"
    "connections that it was using. ": "Any thread may use one `Client`, and many should share one: it keeps its connections "
    "open. The calling thread carries\nits own requests. ",
}


def blocking(source: str, name: str) -> str:
    """The text of the blocking module that is made of `source`, the file `name`."""
    text = re.sub(r"\n\n`sync[^\n]*\n", MARK, source, count=1)
    for awaited, blocked in SENTENCES.items():
        text = text.replace(awaited, blocked)
    for pattern, blocked in NAMES.items():
        text = re.sub(rf"(?<!\w){pattern}", blocked, text)
    text = text.replace(MARK, f"\n\nMade of `{name}`: `python tools/make_client.py`.\n", 1)
    for command in (["check", "--select", "I", "--fix", "--quiet"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", FOLDER / "sync.py", "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


def made() -> dict[Path, str]:
    """The modules of the blocking client by their paths."""
    return {FOLDER / name: blocking((FOLDER / of).read_text(encoding="utf-8"), of) for name, of in MADE.items()}


if __name__ == "__main__":
    for path, text in made().items():
        path.write_text(text, encoding="utf-8")
