"""The first hour of somebody new: `python -m tools.first_hour OUT [--python /usr/bin/python3]`, on Linux with git, make and Chromium.

In a fresh clone with an empty home and empty caches: `make demo`; each block of the tutorial in order, in the demo's environment; a table of
Parquet of one's own, of which every row is read back; the page of that service, under traffic, at three widths, light and dark; and a service
that shares no directory with those who use it (`tools.elsewhere`), of which all rows are compared too. Each step's seconds are said, and pictures
are in OUT.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.service.admin.browser import browser

ROOT = Path(__file__).parents[1]
WIDTHS = (390, 500, 1280)
ROWS, DIM = 1_000_000, 32
TRAFFIC_S = 40  # before the pictures: the page draws ten seconds a point
OWN_TABLE = f"""
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
values = np.random.default_rng(7).normal(size={ROWS * DIM}).astype(np.float32)
vectors = pa.FixedSizeListArray.from_arrays(pa.array(values), {DIM})
pq.write_table(pa.table({{"id": np.arange({ROWS}) * 7, "vector": vectors}}), "own.parquet")
"""
READ_BACK = f"""
import numpy as np, tierstore
expected = np.random.default_rng(7).normal(size={ROWS * DIM}).astype(np.float32).reshape(-1, {DIM})
with tierstore.Client("URL") as client:
    for start in range(0, {ROWS}, 50_000):
        rows = client.lookup("own", "thing", np.arange(start, start + 50_000) * 7)
        assert (rows == expected[start : start + 50_000]).all(), start
"""
TRAFFIC = """
import numpy as np, tierstore
random = np.random.default_rng(1)
with tierstore.Client("URL") as client:
    while True:
        client.lookup("own", "thing", random.zipf(1.2, 500) % 1_100_000 * 7)
        client.lookup("ctr", "item", random.integers(0, 11_000, 20))
"""


class Newcomer:
    """A clone, a home and a shell of somebody who has nothing else."""

    def __init__(self, out: Path, python: str) -> None:
        self.clone, self.work = out / "clone", out / "work"
        for folder in (out / "home", self.work):
            folder.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        own = {
            "HOME": str(out / "home"),
            "PYTHON": python,
            "TIERSTORE_PORT": str(self.port),
            "TIERSTORE_GRPC_PORT": "off",
        }
        kept = {
            name: value for name, value in os.environ.items() if name.lower().startswith(("pip_", "http", "no_proxy"))
        }
        self._environment = kept | own | {"PATH": f"{self.clone}/.venv/bin:/usr/bin:/bin"}

    def __call__(self, line: str, folder: Path | None = None) -> None:
        """Run a line of the shell; it has to end well."""
        line = line.replace("http://127.0.0.1:8000", self.url)
        subprocess.run(["bash", "-ec", line], cwd=folder or self.work, env=self._environment, check=True, stdout=2)

    def python(self, program: str) -> None:
        (self.work / "program.py").write_text(
            program.replace("http://127.0.0.1:8000", self.url).replace("URL", self.url)
        )
        self("python program.py")

    @contextmanager
    def beside(self, line: str) -> Iterator[None]:
        """Run a line meanwhile, until the end or an interrupt."""
        process = subprocess.Popen(["bash", "-ec", f"exec {line}"], cwd=self.work, env=self._environment, stdout=2)
        try:
            yield
            assert process.poll() is None, f"{line}: ended with {process.returncode}"
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def step(name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"{time.monotonic() - began:8.1f} s  {name}", flush=True)


def tutorial() -> list[tuple[str, str]]:
    """(language, text) of the tutorial's blocks, but for that which installs."""
    text = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    return [
        (one, block)
        for one, block in re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        if "pip install" not in block
    ]


def follow_tutorial(do: Newcomer, stack: ExitStack) -> None:
    """Each block; the service of its second command stays until `stack` is closed."""
    for language, block in tutorial():
        if language == "python":
            do.python(block)
            continue
        for line in filter(str.strip, block.splitlines()):
            if line.startswith("tierstore serve"):
                stack.enter_context(do.beside(line.partition("#")[0].strip()))
                do(
                    f"for i in $(seq 600); do ! tierstore status --url {do.url} >/dev/null 2>&1 || exit 0; sleep 0.2; done; exit 1"
                )
            else:
                do(line)


def take_pictures(do: Newcomer, out: Path) -> None:
    with browser(out / "profile") as tab:
        page = tab()
        for width in WIDTHS:
            for dark in (False, True):
                page.size(width, dark=dark)
                page.open(do.url)
                page.wait("document.querySelectorAll('#models .hour').length == 2")
                page.size(width, page.evaluate("document.documentElement.scrollHeight"), dark=dark)
                beyond = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                page.screenshot(out / f"page-{width}-{'dark' if dark else 'light'}.png")
                print(
                    f"            {width} pixels, {'dark' if dark else 'light'}: {beyond} pixels beyond the edge",
                    flush=True,
                )
        assert not page.errors, page.errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default="/usr/bin/python3")
    given = parser.parse_args()
    out = given.out.resolve()
    do = Newcomer(out, given.python)
    with step("git clone"):
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(do.clone)], check=True)
    with step("make demo"):
        do("make demo", do.clone)
    with ExitStack() as stack:
        with step("the tutorial"):
            follow_tutorial(do, stack)
        with step(f"{ROWS:,} rows of one's own, written"):
            do.python(OWN_TABLE)
        with step("imported into the service"):
            do(
                f"tierstore import own.parquet --model own --table thing --key id --vector vector --version 1 --url {do.url}"
            )
        with step("every row read back"):
            do.python(READ_BACK)
        (do.work / "traffic.py").write_text(TRAFFIC.replace("URL", do.url))
        with do.beside("python traffic.py"), step("traffic, and pictures"):
            time.sleep(TRAFFIC_S)
            take_pictures(do, out)
    with step("a service that shares nothing"):
        do(f"python -m tools.elsewhere {out / 'elsewhere'} --rows {ROWS}", do.clone)
    return 0


if __name__ == "__main__":
    sys.exit(main())
