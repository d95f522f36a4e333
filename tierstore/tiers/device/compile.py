"""Compiles the kernels to machine code, by NVRTC.

It takes about a second and writes no file. CuPy's own way to compile (`RawModule`) is not used: it adds `-ftz=true`, so that numbers below 2^-126
would become zeros and answers would differ from the CPU's; it needs CUDA's headers, which the kernels do not; and its cache on disk fails if the home
directory cannot be written. Any thread may call; nothing survives the process.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tierstore.tiers.device.backend import DeviceError, kernel_source

OPTIONS = ("-std=c++17", "-ftz=false")


@cache
def compile_kernels(nvrtc: Any, capability: str) -> bytes:
    """Compile for a device of `capability` (`90` is 9.0). `nvrtc` is `cupy.cuda.nvrtc`.

    Returns a CUBIN; or, for a device newer than this NVRTC, PTX, which the driver translates. DeviceError if NVRTC is missing or refuses.
    """
    try:
        supported = nvrtc.getSupportedArchs()
    except Exception as error:  # each version of CuPy raises a different error
        raise DeviceError(
            f"NVRTC, which compiles the kernels, cannot be used: {error}; pip install 'tierstore[gpu]' brings it "
            "for CUDA 12, 'tierstore[gpu-cuda13]' for CUDA 13"
        ) from error
    exact = int(capability) in supported
    target = (
        int(capability)
        if exact
        else max((arch for arch in supported if arch < int(capability)), default=min(supported))
    )
    options = (*OPTIONS, f"-arch={'sm' if exact else 'compute'}_{target}")
    program = nvrtc.createProgram(kernel_source(), "kernels.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        code: bytes = nvrtc.getCUBIN(program) if exact else nvrtc.getPTX(program)
    except nvrtc.NVRTCError as error:
        raise DeviceError(f"NVRTC refuses the kernels ({error}): {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    return code
