"""The container image: what the Dockerfile says, read off it, and its image built and run by Debian's buildah.

The base is made by debootstrap: Debian with its own Python, laid out as the official images of Python are. Steps run with
`--isolation chroot`, which takes neither an engine nor namespaces, as root.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = ("buildah", "debootstrap", "ip", "unshare", "nsenter")
SUITE = "bookworm"  # of Debian, with Python 3.11
OF_THE_MACHINE = (
    "/etc/ssl/certs",
    "/etc/pip.conf",
)  # how packages are had here; seen by the build, and not kept in the image
ISOLATION = ("--isolation", "chroot")


def instructions() -> list[tuple[str, str]]:
    """(name, arguments) of the Dockerfile's instructions, in order."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines if line.strip())]


def instruction(name: str) -> str:
    return next(text for one, text in instructions() if one == name)


def environment() -> dict[str, str]:
    """What ENV sets."""
    pairs = (pair.split("=", 1) for name, text in instructions() if name == "ENV" for pair in shlex.split(text))
    return dict(pairs)


def command() -> list[str]:
    """What the image runs."""
    return [part for name in ("ENTRYPOINT", "CMD") for part in json.loads(instruction(name))]


def health_check() -> list[str]:
    """The command of HEALTHCHECK."""
    parts: list[str] = json.loads(instruction("HEALTHCHECK").partition("CMD")[2])
    return parts


def copy_context(into: Path) -> None:
    """Do what COPY does, with what .dockerignore lets pass."""
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name, text in instructions():
        if name != "COPY":
            continue
        *sources, target = text.split()
        for source in sources:
            assert source in allowed, f"COPY {source}: .dockerignore keeps it out"
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, into / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, into / target)


class Images:
    """Images and containers in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._buildah = ["buildah", "--root", f"{folder}/root", "--runroot", f"{folder}/run", "--storage-driver", "vfs"]

    def _do(self, *arguments: str) -> str:
        done = subprocess.run([*self._buildah, *arguments], stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.strip()

    def files(self, container: str) -> Path:
        return Path(self._do("mount", container))

    def container(self, image: str) -> str:
        return self._do("from", "--pull-never", image)

    def make_base(self, name: str) -> None:
        container = self._do("from", "scratch")
        files = str(self.files(container))
        subprocess.run(
            ["debootstrap", "--variant=minbase", "--include=python3-venv", SUITE, files], stdout=2, check=True
        )
        subprocess.run(["chroot", files, "python3", "-m", "venv", "/usr/local"], check=True)
        self._do("commit", "--quiet", "--rm", container, name)

    def build(self, name: str, base: str) -> None:
        seen = [part for path in OF_THE_MACHINE if Path(path).exists() for part in ("--volume", f"{path}:{path}:ro")]
        options = [*ISOLATION, "--format", "docker", "--layers=false", "--build-arg", f"BASE={base}", *seen]
        self._do("bud", "--quiet", *options, "--tag", name, str(ROOT))

    def run(self, container: str, snapshots: Path, command: list[str]) -> list[str]:
        """The command line that runs a command in a container, as the image's user."""
        volume = f"{snapshots}:{environment()['TIERSTORE_SOURCE_ROOT']}:ro"
        return [*self._buildah, "run", *ISOLATION, "--volume", volume, container, "--", *command]


@contextmanager
def images() -> Iterator[Images]:
    """Removed at the end, as they are some gigabytes."""
    folder = tempfile.mkdtemp(prefix="tierstore-image-")
    try:
        yield Images(Path(folder))
    finally:
        assert folder not in Path("/proc/mounts").read_text(), (
            f"something is mounted below {folder}, which is left as it is"
        )
        shutil.rmtree(folder)


def alone(command: list[str]) -> list[str]:
    """The command line with a network of its own, of which only loopback is up."""
    return ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]


def beside(process: int, command: list[str]) -> list[str]:
    """The command line in the network of a process."""
    return ["nsenter", f"--net=/proc/{process}/ns/net", *command]


def descendants(process: int) -> Iterator[int]:
    """Of any of its threads."""
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from descendants(child)


def of_the_user(process: int) -> list[int]:
    """What the image's user runs below a process, that of the command first."""
    found = [one for one in descendants(process) if os.stat(f"/proc/{one}").st_uid == int(instruction("USER"))]
    return [one for one in found if b"buildah" not in Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0")[0]]


def written(files: Path) -> set[str]:
    """In which folders of a container's root its user has files."""
    found = {path.relative_to(files) for path in files.rglob("*") if path.lstat().st_uid == int(instruction("USER"))}
    return {path.parts[0] for path in found if len(path.parts) > 1}
