"""Kernels that a wheel carries, compiled for all processors with common features.

`tools/make_compiled_wheel.py` makes such a wheel, for one Python and one numba. Where this processor has the features, and the sources
and numba are those of the wheel, its kernels are read as they are; else kernels are compiled here, for this processor.
"""

from __future__ import annotations

from pathlib import Path

import llvmlite.binding

Machine = tuple[str, str, str]  # numba's words: the system, the processor, its features

FOLDER = Path(__file__).parents[1] / "compiled"  # in a checkout there is none

# By the first part of numba's word for the system, LLVM's words for a processor and its features.
# x86-64-v3 is defined by the System V ABI, AMD64 supplement, "Micro-architecture levels": Intel from Haswell on, AMD from Zen on.
COMMON = {
    "x86_64": (
        "x86-64-v3",
        "+avx,+avx2,+bmi,+bmi2,+cx16,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sahf,+sse3,+sse4.1,+sse4.2,+ssse3,+xsave",
    ),
    "aarch64": ("generic", "+crc,+lse,+neon"),
}


def machine(system: str) -> Machine | None:
    """What a wheel's kernels are compiled for, if this processor has all of its features. None where it has not, or in a checkout."""
    if not FOLDER.is_dir():
        return None
    processor, features = COMMON.get(system.partition("-")[0], ("", "none"))
    here = llvmlite.binding.get_host_cpu_features()
    return (system, processor, features) if all(here.get(one[1:]) for one in features.split(",")) else None
