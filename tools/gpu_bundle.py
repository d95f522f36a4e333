"""Wheels for a machine with a GPU and no network: `python -m tools.gpu_bundle FOLDER [--python 3.12] [--has FILE] [--hkv HEADERS]`.

`make gpu-bundle` calls it, and `tools/on_card.sh` installs from the folder, offline. Packages are those that the store and the tests
on a GPU take, in the versions of this environment, without those that machines with a GPU have anyway (`THERE`). `--has` names
a file of such a machine's `pip list --format=freeze` in place of that list: what it has is left out, in whatever version.
With `--hkv` and an nvcc the library of HierarchicalKV is built for `--capability` too. ONNX Runtime for GPUs (250 MB) is not packed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import hierarchical_kv

MOST_BYTES = 60 << 20
# what tests/conftest.py and the tests on a GPU import beside the package
TESTS = ("pytest", "pytest-xdist", "hypothesis", "httpx", "ml_dtypes", "onnx", "onnxruntime")
# of images for machine learning on a GPU: large, or bound to the driver
THERE = (
    "cupy-cuda12x", "cupy-cuda13x", "jax", "jaxlib", "llvmlite", "ml-dtypes", "numba", "numpy", "onnx", "onnxruntime", "pandas", "pip", "protobuf",
    "pyarrow", "scipy", "setuptools", "torch", "triton",
)  # fmt: skip
GLIBC = (
    "manylinux1",
    "manylinux2010",
    "manylinux2014",
    *(f"manylinux_2_{minor}" for minor in (5, 12, 17, 24, 26, 27, 28, 31, 34, 35)),
)


def needed(roots: Iterable[str], python: str, there: set[str]) -> dict[str, str]:
    """Package -> version of all that `roots` need under `python`, as installed here, and `there` lacks."""
    environment = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    found: dict[str, str] = {}
    seen: set[str] = set()
    waiting = [canonicalize_name(root) for root in roots]
    while waiting:
        name = waiting.pop()
        if name in seen or name in there:
            continue
        seen.add(name)
        package = metadata.distribution(name)
        found[name] = package.version
        for line in package.requires or ():
            needs = Requirement(line)
            if needs.marker is None or needs.marker.evaluate(environment):
                waiting.append(canonicalize_name(needs.name))
    found.pop("tierstore", None)  # the checkout itself
    return dict(sorted(found.items()))


def names_in(freeze: str) -> set[str]:
    """The packages of a `pip list --format=freeze`, or of a plain list of names."""
    return {canonicalize_name(line) for line in re.findall(r"^\s*([A-Za-z0-9][\w.-]*)", freeze, re.M)}


def download(packages: dict[str, str], python: str, folder: Path) -> None:
    platforms = [option for glibc in GLIBC for option in ("--platform", f"{glibc}_x86_64")]
    subprocess.run(
        [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--implementation", "cp",
            "--python-version", python, *platforms, "--dest", str(folder), *(f"{name}=={version}" for name, version in packages.items()),
        ],
        check=True,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU")
    parser.add_argument("--has", type=Path, help="what that machine has: a file of its `pip list --format=freeze`")
    parser.add_argument("--hkv", type=Path, help="headers of HierarchicalKV")
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--capability", default="90", help="of the GPU, for HierarchicalKV: 90 is an H100 or H200")
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    there = names_in(options.has.read_text(encoding="utf-8")) if options.has else set(THERE)
    packages = needed(("tierstore", *TESTS), options.python, there)
    download(packages, options.python, options.folder)
    if options.hkv is not None:
        hierarchical_kv.build(options.hkv, options.capability, options.folder / "hierarchical_kv.so", options.nvcc)
    files = sorted(options.folder.iterdir())
    size = sum(file.stat().st_size for file in files)
    print(f"{len(files)} files, {size / (1 << 20):.1f} MiB, for Python {options.python}: {', '.join(packages)}")
    print(
        "not packed: ONNX Runtime for GPUs; "
        + ("" if options.hkv else "HierarchicalKV (no --hkv); ")
        + "tests and parts that want them skip"
    )
    if size > MOST_BYTES:
        sys.exit(f"more than {MOST_BYTES >> 20} MiB: name what that machine has with --has")


if __name__ == "__main__":
    main()
