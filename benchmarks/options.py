"""Options of a benchmark, of one shape: its sizes, its numbers with their defaults, and where its document goes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

HIDDEN = argparse.SUPPRESS  # in place of a help: for the processes that a benchmark starts of itself
SIZES = {
    "tiny": "to see that it runs; its figures mean nothing",
    "quick": "fewer and shorter rounds, fewer rows",
    "full": "more and longer rounds",
}


def parser_of(file: str, doc: str | None, *sizes: str, **options: Any) -> argparse.ArgumentParser:
    """The parser of the benchmark in `file`: one of its `sizes`, `--json`, and an option for each keyword.

    A keyword's value is the default, or (default, help). The default's type is the option's: a list takes several, False is a
    flag, and a type stands for an option without a default.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group() if sizes else parser
    for name in sizes:
        size.add_argument(f"--{name}", action="store_true", help=SIZES[name])
    for name, value in options.items():
        default, text = value if isinstance(value, tuple) else (value, None)
        flag = "--" + name.replace("_", "-")
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
        elif isinstance(default, list):
            parser.add_argument(flag, type=type(default[0]), nargs="+", default=default, help=text)
        elif isinstance(default, type):
            parser.add_argument(flag, type=default, help=text)
        else:
            parser.add_argument(flag, type=type(default), default=default, help=text)
    parser.add_argument("--json", type=Path, default=Path(f"build/{Path(file).stem}.json"), help="where results go")
    return parser
