"""Kernels that a wheel carries, compiled for all processors with a common set of features.

`tools/make_compiled_wheel.py` makes such a wheel, for one Python and one numba. If this processor has the features, and sources and numba are the
wheel's, its kernels are used; otherwise kernels are compiled here, for this processor.
"""

from __future__ import annotations

from pathlib import Path

import llvmlite.binding

Machine = tuple[str, str, str]  # as numba names them: the system, the processor, its features

FOLDER = Path(__file__).parents[1] / "compiled"  # a checkout has none

# Key: the first part of numba's name for the system; values: LLVM's names for a processor and its features. x86-64-v3 is defined by the System V ABI,
# AMD64 supplement, "Micro-architecture levels": Intel from Haswell on, AMD from Zen on.
COMMON = {
    "x86_64": (
        "x86-64-v3",
        "+avx,+avx2,+bmi,+bmi2,+cx16,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sahf,+sse3,+sse4.1,+sse4.2,+ssse3,+xsave",
    ),
    "aarch64": ("generic", "+crc,+lse,+neon"),
}


def machine(system: str) -> Machine | None:
    """The machine that a wheel's kernels are compiled for; None if this processor lacks a feature, or in a checkout."""
    if not FOLDER.is_dir():
        return None
    processor, features = COMMON.get(system.partition("-")[0], ("", "none"))
    here = llvmlite.binding.get_host_cpu_features()
    return (system, processor, features) if all(here.get(one[1:]) for one in features.split(",")) else None
