"""Make a wheel with compiled kernels of a pure one: `pip install` of it compiles nothing on processors with common features.

python -m tools.make_compiled_wheel dist/tierstore-0.2.0-py3-none-any.whl

It is for this Python, this kind of processor (`tierstore/kernels/carried.py`) and the numba that is installed; pip prefers it to the pure one where
Python and processor fit. Where numba is another, kernels are compiled as with the pure one.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from tierstore.kernels.carried import COMMON, FOLDER

SYSTEM = (
    "manylinux_2_17"  # kernels call glibc for no more than memory and files: as old a one as NumPy's wheels ask for
)


def compile_in(package: Path) -> None:
    """Compile the kernels of an unpacked wheel into the folder that it carries them in."""
    processor, features = COMMON[platform.machine()]
    with tempfile.TemporaryDirectory() as cache:
        named = {"NUMBA_CACHE_DIR": cache, "NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": features}
        command = [sys.executable, "-P", "-m", "tierstore", "compile", "--data", cache]
        subprocess.run(command, check=True, env={**os.environ, **named, "PYTHONPATH": str(package)})
        (made,) = Path(cache).glob("kernels_*")
        shutil.copytree(made, package / "tierstore" / FOLDER.name)


def write_wheel(package: Path, out: Path, tag: str) -> None:
    """Pack the files again, with their digests in RECORD as the wheel format has them (PEP 427)."""
    (info,) = package.glob("*.dist-info")
    wheel, record = info / "WHEEL", info / "RECORD"
    kept = [line for line in wheel.read_text().splitlines() if not line.startswith(("Tag:", "Root-Is-Purelib:"))]
    wheel.write_text("\n".join([*(line for line in kept if line), "Root-Is-Purelib: false", f"Tag: {tag}", ""]))
    lines = []
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(path for path in package.rglob("*") if path.is_file() and path != record):
            name, content = str(file.relative_to(package)), file.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(content)}\n")
            archive.writestr(name, content)
        archive.writestr(str(record.relative_to(package)), "".join([*lines, f"{record.relative_to(package)},,\n"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path, help="the pure one")
    wheel: Path = parser.parse_args().wheel
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tag = f"{python}-{python}{sysconfig.get_config_var('ABIFLAGS') or ''}-{SYSTEM}_{platform.machine()}"
    out = wheel.with_name(f"{wheel.name.removesuffix('py3-none-any.whl')}{tag}.whl")
    with tempfile.TemporaryDirectory() as unpacked:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        compile_in(Path(unpacked))
        write_wheel(Path(unpacked), out, tag)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB, beside {wheel.stat().st_size / 1e6:.1f} MB without kernels")


if __name__ == "__main__":
    main()
