"""Quantized tables: codes whose numbers follow from scales and offsets beside them. Pure functions; any thread."""

from __future__ import annotations

import re
from collections.abc import Iterable

# words of FBGEMM, TorchRec, PyTorch, bitsandbytes and others
_WORD = r"q(?:uant_?)?bias|(?:q|quant_?)?(?:scales?|scale_?shift|shifts?|zeros?|zero_?points?|offsets?|absmax|scb)"
_COMPANION = re.compile(rf"(?:.*[._])?(?:{_WORD})(?:_inv)?", re.IGNORECASE)
_SIBLING = re.compile(_WORD, re.IGNORECASE)


def companions(name: str, names: Iterable[str]) -> list[str]:
    """What of `names` says how to read the codes `name`: `w_qscale` of `w`, `item.scale` of `item.weight`."""
    module = name.rpartition(".")[0]
    return [
        one
        for one in names
        if (one.startswith((f"{name}_", f"{name}.")) and _COMPANION.fullmatch(one[len(name) :]))
        or (one.rpartition(".")[0] == module and _SIBLING.fullmatch(one.rpartition(".")[2]))
    ]
