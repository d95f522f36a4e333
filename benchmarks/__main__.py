"""Measures this machine: `python -m benchmarks [--full | --tiny] [--only NAME …] [--cores N] [--json DIR]`.

Runs every benchmark module of this folder in a process of its own, one after the other, on the same cores, and
collects their JSON documents in DIR/report.json and DIR/report.md. A benchmark is a module that can be run and
has its options of `benchmarks/options.py`. Ends with 1 if one of them failed; that a mark was missed is a result,
not a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from benchmarks import report
from benchmarks.footprint import load
from benchmarks.machine import describe

HERE = Path(__file__).parent
SIZES = ("tiny", "default", "full")
LIMIT_S = {"tiny": 300, "default": 900, "full": 7200}  # a benchmark that takes longer hangs
TOLD_LINES = 15

# Arguments by size, for benchmarks that do not take --tiny and --full themselves; None leaves it out.
ARGUMENTS: dict[str, dict[str, list[str] | None]] = {
    "cache_policy": {"tiny": None, "default": ["--quick"], "full": []},
    "ten_million": {
        "tiny": ["--rows", "20000", "--host-budget", "1MiB", "--zipf-calls", "4"],
        "default": ["--rows", "1000000", "--host-budget", "32MiB", "--zipf-calls", "400"],
        "full": [],
    },
    "tier_costs": {"tiny": ["--tiny"], "default": ["--quick"], "full": []},
    "wire_grpc": {"tiny": None, "default": ["--quick"], "full": []},
    "wire_lookup": {"tiny": None, "default": ["--quick"], "full": []},
}


@dataclass(frozen=True)
class Benchmark:
    name: str
    source: str

    def arguments(self, size: str) -> list[str] | None:
        """What to run it with, without --json; None if it has no part in a run of this size."""
        if self.name in ARGUMENTS:
            return ARGUMENTS[self.name][size]
        if size == "default":
            return []
        if re.search(rf'parser_of\(\s*__file__,\s*__doc__,[^)]*?"{size}"', self.source):
            return [f"--{size}"]
        return None if size == "tiny" else []


def discover() -> list[Benchmark]:
    """All benchmarks of this folder, by name."""
    modules = ((path.stem, path.read_text(encoding="utf-8")) for path in sorted(HERE.glob("*.py")))
    return [
        Benchmark(name, source)
        for name, source in modules
        if name != "__main__" and "parser_of(" in source and "__main__" in source
    ]


def run(benchmark: Benchmark, size: str, more: list[str], folder: Path) -> dict[str, Any]:
    """Run it and return its document; one with `failed` if there is none."""
    result, log = folder / f"{benchmark.name}.json", folder / f"{benchmark.name}.log"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"benchmarks.{benchmark.name}", *(benchmark.arguments(size) or []), *more]
    began, load_before = time.perf_counter(), load()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--json", str(result)],
            cwd=HERE.parent, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | str = process.wait(LIMIT_S[size])
        except subprocess.TimeoutExpired:
            code = f"it was stopped after {LIMIT_S[size]} s"
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and what it started
                process.wait()
    document: dict[str, Any] = {"benchmark": benchmark.name, "machine": describe(), "load_before": load_before}
    with contextlib.suppress(OSError, orjson.JSONDecodeError):
        document |= orjson.loads(result.read_bytes())
    document |= {
        "command": " ".join(["python", *command[1:]]),
        "seconds": time.perf_counter() - began,
        "load_after": load(),
    }
    if code != 0 or not result.exists():
        said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TOLD_LINES:]
        document["failed"] = f"ended with {code}: " + " / ".join(line for line in said if line.strip())
    return document


def combined(documents: list[dict[str, Any]], size: str, began: float) -> dict[str, Any]:
    """The report of a whole run."""
    headlines = [{"benchmark": d["benchmark"], **row} for d in documents for row in d.get("headlines", [])]
    return {
        "machine": describe(), "size": size, "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(began)),
        "seconds": time.time() - began, "headlines": headlines, "benchmarks": documents,
    }  # fmt: skip


def markdown(document: dict[str, Any]) -> str:
    """The report for people: all figures with a mark first, then every benchmark."""
    loads = [d["load_before"][0] for d in document["benchmarks"] if d.get("load_before")]
    lines = [
        "# Benchmarks",
        "",
        f"{document['machine']}. Run of {document['date']}, size {document['size']}, {document['seconds'] / 60:.1f} minutes. "
        f"Load average when a benchmark began: {', '.join(f'{value:.1f}' for value in loads)}.",
        "",
    ]
    if document["headlines"]:
        lines += [*report.headlines(document["headlines"]), ""]
    for one in document["benchmarks"]:
        if "failed" in one:
            lines += [f"## {one['benchmark']}", "", f"**Failed**: {one['failed']}", ""]
        else:
            own = {name: value for name, value in one.items() if name != "headlines"}  # those stand above
            lines += [report.markdown(own), f"`{one['command']}`", ""]
    return "\n".join(lines)


def main() -> int:
    benchmarks = {benchmark.name: benchmark for benchmark in discover()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_const", const="full", dest="size", help="everything; tens of minutes")
    size.add_argument(
        "--tiny", action="store_const", const="tiny", dest="size", help="to see that it runs; its figures mean nothing"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=sorted(benchmarks), help=", ".join(sorted(benchmarks))
    )
    parser.add_argument(
        "--cores", type=int, default=2, help="cores that all of them share (default 2; 0: all there are)"
    )
    parser.add_argument("--tfra", type=Path, help="a Python that has tensorflow-recommenders-addons, for lookup_peers")
    parser.add_argument("--json", type=Path, default=Path("build/bench"), metavar="DIR", help="where results go")
    options = parser.parse_args()
    chosen = options.size or "default"
    if options.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    options.json.mkdir(parents=True, exist_ok=True)
    began, documents = time.time(), []
    for name, benchmark in benchmarks.items():
        if options.only and name not in options.only:
            continue
        if benchmark.arguments(chosen) is None:
            print(f"{name}: not part of a {chosen} run", flush=True)
            continue
        more = ["--tfra", str(options.tfra)] if options.tfra and name == "lookup_peers" else []
        print(f"{name} …", end=" ", flush=True)
        documents.append(run(benchmark, chosen, more, options.json.absolute()))
        print(f"{'FAILED' if 'failed' in documents[-1] else 'done'}, {documents[-1]['seconds']:.0f} s", flush=True)
    document = combined(documents, chosen, began)
    report.write(options.json / "report.json", document)
    text = markdown(document)
    (options.json / "report.md").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}\n{options.json / 'report.md'}, {options.json / 'report.json'}")
    return int(any("failed" in one for one in documents))


if __name__ == "__main__":
    sys.exit(main())
