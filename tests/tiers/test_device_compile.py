"""The kernels through NVIDIA's own compilers, of which neither needs a GPU: `nvcc`, and NVRTC as the store uses it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tiers import nvrtc
from tests.tiers.cuda_shim.backend import ShimDevice
from tests.tiers.cuda_shim.cupy_stand_in import CupyStandIn, NvrtcStandIn
from tests.tiers.devices import over_stand_in
from tierstore.tiers.device.backend import DeviceError, kernel_names, kernel_source
from tierstore.tiers.device.compile import OPTIONS, compile_kernels

ARCHS = pytest.mark.parametrize("arch", ["80", "90", "100"])
COMPILERS = pytest.mark.parametrize(
    "compiler",
    [
        pytest.param("nvcc", marks=pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")),
        pytest.param("nvrtc", marks=pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not installed")),
    ],
)


def built(compiler: str, arch: str, folder: Path) -> str:
    """What the compiler says of every kernel's use of the chip."""
    if compiler == "nvrtc":
        library = nvrtc.library()
        assert library is not None
        through = nvrtc.Nvrtc(library, "--ptxas-options=-v")
        assert compile_kernels(through, arch).startswith(b"\x7fELF")
        return through.log
    return _nvcc("-cubin", f"-arch=sm_{arch}", "-Xptxas", "-v", folder=folder)[1]


def text(compiler: str, arch: str, folder: Path) -> str:
    """The kernels in PTX."""
    if compiler == "nvrtc":
        library = nvrtc.library()
        assert library is not None
        through = nvrtc.Nvrtc(library)
        program = through.createProgram(kernel_source(), "kernels.cu", (), ())
        through.compileProgram(program, (*OPTIONS, f"-arch=compute_{arch}"))
        return through.getPTX(program).decode()
    return _nvcc("-ptx", f"-arch=compute_{arch}", folder=folder)[0]


def _nvcc(*options: str, folder: Path) -> tuple[str, str]:
    source, result = folder / "kernels.cu", folder / "result"
    source.write_text(kernel_source(), encoding="utf-8")
    done = subprocess.run(
        ["nvcc", *OPTIONS, *options, "-o", str(result), str(source)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return result.read_text(errors="replace"), done.stderr


@pytest.mark.thorough
@ARCHS
@COMPILERS
def test_every_kernel_compiles_without_spilling_a_register_or_using_a_stack(
    compiler: str, arch: str, tmp_path: Path
) -> None:
    said = built(compiler, arch, tmp_path)
    assert sorted(re.findall(r"Compiling entry function '(\w+)'", said)) == sorted(kernel_names())
    used = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert used == [("0", "0", "0")] * len(kernel_names())
    assert max(map(int, re.findall(r"Used (\d+) registers", said))) <= 128  # two blocks a multiprocessor at least


@COMPILERS
def test_rows_move_sixteen_bytes_at_a_time_and_small_numbers_are_no_zeros(compiler: str, tmp_path: Path) -> None:
    kernels = re.split(r"\.entry ", text(compiler, "90", tmp_path))[1:]
    code = {re.match(r"\w+", kernel).group(): kernel for kernel in kernels}  # type: ignore[union-attr]
    assert sorted(code) == sorted(kernel_names())
    assert re.search(
        r"ld(\.global)?\.v2\.[bu]64", code["look_up"]
    )  # a way's key and its neighbour, of the line of a set
    for name in ("look_up", "put_rows", "pool", "pool_waiting", "insert", "merge", "split"):
        assert re.search(r"ld(\.global)?\.v4\.[buf]32", code[name]), name
        assert re.search(r"st(\.global)?\.v4\.[buf]32", code[name]), name
    assert not [line for kernel in kernels for line in kernel.splitlines() if ".ftz" in line]
    assert "fma.rn.f32" in code["look_up"]  # rows of int8 and int4


class _Refusing(NvrtcStandIn):
    refused = True


class _Missing(NvrtcStandIn):
    def getSupportedArchs(self) -> tuple[int, ...]:
        raise RuntimeError("no such file: libnvrtc.so.12")


def test_a_compiler_that_refuses_or_is_not_there_is_a_device_that_cannot_be_used() -> None:
    cupy = CupyStandIn(ShimDevice())
    for nvrtc_, message in ((_Refusing(), r"kernels.cu\(3\): error"), (_Missing(), r"libnvrtc.*tierstore\[gpu\]")):
        cupy.cuda.nvrtc = nvrtc_
        with pytest.raises(DeviceError, match=message):
            over_stand_in(cupy).stream()


@pytest.mark.parametrize(
    ("capability", "arch", "code"),
    [("90", "sm_90", b"code"), ("86", "compute_80", b"text"), ("120", "compute_90", b"text")],
)
def test_a_device_that_is_newer_than_the_compiler_gets_what_its_driver_translates(
    capability: str, arch: str, code: bytes
) -> None:
    through = NvrtcStandIn()
    assert compile_kernels(through, capability) == code
    assert through.options == (*OPTIONS, f"-arch={arch}")
