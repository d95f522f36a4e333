"""Write docs/layouts.md, the layouts that Python and compiled kernels share: `python -m tools.make_layouts_page`.

Git ignores the page, as it is long and follows the kernels; the documentation site has it.
"""

from __future__ import annotations

import importlib
from itertools import groupby
from pathlib import Path

import numpy as np

from tierstore import kernels
from tierstore.kernels.records import ALL, Record

PAGE = Path(__file__).parents[1] / "docs/layouts.md"
HEAD = """# Layouts shared by Python and kernels

Made by `python -m tools.make_layouts_page` from the records of the kernels (`tierstore/kernels/records.py` says how they are used). They are only in memory:
no file and no message has them, and they may change with any version. Numbers are little-endian, int64 where no type is named; a
field whose type is another record has the address of one, or 0.
"""


def _kind(record: Record, field: str) -> str:
    kind, _ = record.fields[field]
    if isinstance(kind, Record):
        return f"[{kind.name}](#{kind.name.lower()})"
    dtype = record.dtype[field]
    base, shape = dtype.subdtype or (dtype, ())
    name = "" if base == np.int64 else " ".join(base.names or (base.name,))
    return f"{name or ('int64' if shape else '')}{list(shape) if shape else ''}"


def _section(record: Record) -> str:
    rows = []
    for (kind, text), names in groupby(record.fields, lambda name: (_kind(record, name), record.fields[name][1])):
        fields = list(names)
        named = " ".join(f"`{field}`" for field in fields)
        rows.append(f"| {record.offset(fields[0])} | {named} | {kind} | {text} |")
    head = f"\n## {record.name}\n\n{record.says[0].upper()}{record.says[1:]}. {record.bytes} bytes.\n\n"
    return head + "| at | fields | type | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def page() -> str:
    for module in kernels.modules():
        importlib.import_module(module)
    return HEAD + "".join(_section(ALL[name]) for name in sorted(ALL))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
