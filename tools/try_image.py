"""Follows the Dockerfile without a container engine: `python -m tools.try_image`, as root, on Linux; some minutes.

Files are copied as COPY says, and RUN's own commands run in an empty virtual environment, of this Python in place of the
image's. Then the entry point runs as the image's user, without HOME, with ENV and nothing else, as process 1 of namespaces of
its own, in a root directory that is read-only but for /data. The health check must pass, a model must be loaded from
/snapshots and be served, and SIGTERM must end it in order within the grace of docker-compose.yml.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "etc", "proc", "dev", "sys")
START_S = 300  # on a machine that does much else
LOOKUP = """
import tierstore
with tierstore.Client("http://127.0.0.1:8000") as client:
    client.load_snapshot("/snapshots/1", model="m")
    assert client.lookup("m", "item", [3]).tolist() == [[3.0, 3.0]]
"""


def instructions() -> list[tuple[str, str]]:
    """(name, arguments) of the Dockerfile's instructions, in order."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines if line.strip())]


def environment() -> dict[str, str]:
    """What ENV sets."""
    pairs = (pair.split("=", 1) for name, text in instructions() if name == "ENV" for pair in shlex.split(text))
    return dict(pairs)


def copy_context(into: Path) -> None:
    """Do what COPY does, with what .dockerignore lets pass."""
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name, text in instructions():
        if name != "COPY":
            continue
        *sources, target = text.split()
        for source in sources:
            if source not in allowed:
                raise SystemExit(f"COPY {source}: .dockerignore keeps it out")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, into / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, into / target)


def build(work: Path) -> None:
    """The steps that make the image."""
    (work / "context").mkdir()
    copy_context(work / "context")
    subprocess.run([sys.executable, "-m", "venv", work / "venv"], check=True)
    env = {"PATH": f"{work}/venv/bin:/usr/bin:/bin", "HOME": str(work)}
    for name, text in instructions():
        if name == "RUN" and "useradd" not in text:  # the user needs no name here
            began = time.monotonic()
            subprocess.run(["sh", "-c", text], cwd=work / "context", env=env, check=True)
            print(f"RUN {text}: {time.monotonic() - began:.0f} s", flush=True)


def start(work: Path) -> subprocess.Popen[str]:
    """The image's process, in namespaces and a root directory of its own."""
    image, user = work / "image", next(text for name, text in instructions() if name == "USER")
    command = [part for name, text in instructions() if name in ("ENTRYPOINT", "CMD") for part in json.loads(text)]
    for folder in ("data", "snapshots", "tmp", *SYSTEM):
        (image / folder).mkdir(parents=True)
    shutil.copytree(work / "snapshots", image / "snapshots", dirs_exist_ok=True)
    shutil.chown(image / "data", int(user), int(user))
    steps = ["set -e", f"mount --bind {image} {image}", f"mount -t tmpfs tmpfs {image}/tmp"]
    steps += [f"mount --rbind /{name} {image}/{name}" for name in SYSTEM if Path("/", name).exists()]
    for path in dict.fromkeys((sys.base_prefix, str(work / "venv"))):
        if not path.startswith("/usr"):
            steps += [f"mkdir -p {image}{path}", f"mount --bind {path} {image}{path}", f"mount -o remount,bind,ro {image}{path}"]  # fmt: skip
    steps += [
        f"mount --bind {image}/data {image}/data",
        f"mount -o remount,bind,ro {image}",
        f"mount -o remount,ro {image}/tmp",
        "ip link set lo up",
    ]
    env = [f"{name}={value}" for name, value in {**environment(), "PATH": f"{work}/venv/bin:/usr/bin:/bin"}.items()]
    inner = shlex.join(["chroot", f"--userspec={user}:{user}", str(image), "env", "-i", "-C", "/data", *env, *command])
    steps.append(f"exec {inner}")
    namespaces = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--propagation", "private"]
    return subprocess.Popen(
        [*namespaces, "sh", "-c", "\n".join(steps)], stdout=sys.stdout, stderr=sys.stderr, text=True
    )


def inside(service: subprocess.Popen[str], command: list[str]) -> bool:
    """Run a command as the image's user, where the service runs. Whether it succeeded."""
    pid = process_of(service)
    user = next(text for name, text in instructions() if name == "USER")
    enter = ["nsenter", "-t", str(pid), "--mount", "--net", "--root", f"--wd=/proc/{pid}/cwd", "-S", user, "-G", user]
    environ = Path(f"/proc/{pid}/environ").read_text().rstrip("\0").split("\0")
    done = subprocess.run([*enter, "env", "-i", *environ, *command], capture_output=True, text=True, timeout=60)
    if done.returncode and "URLError" not in done.stderr:
        print(done.stderr, file=sys.stderr)
    return done.returncode == 0


def process_of(service: subprocess.Popen[str]) -> int:
    return int(Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text().split()[0])


def main() -> int:
    grace = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["x-node"]["stop_grace_period"]
    health = next(text for name, text in instructions() if name == "HEALTHCHECK")
    work = Path(tempfile.mkdtemp(prefix="tierstore-image-"))
    work.chmod(0o755)
    try:
        build(work)
        python = str(work / "venv/bin/python")
        subprocess.run([python, "-c", "import tierstore; tierstore.import_table({'key': [3], 'vector': [[3.0, 3.0]]}, model='m', table='item', out='snapshots/1', version=1)"], cwd=work, check=True)  # fmt: skip
        began = time.monotonic()
        service = start(work)
        try:
            check = json.loads(health.partition("CMD")[2])
            while not (time.monotonic() - began > 0.5 and inside(service, check)):
                if service.poll() is not None or time.monotonic() - began > START_S:
                    raise SystemExit(f"not ready: ended with {service.poll()} after {time.monotonic() - began:.0f} s")
                time.sleep(0.5)
            print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
            if not inside(service, ["python", "-c", LOOKUP]):
                raise SystemExit("a model cannot be loaded and looked up")
            began = time.monotonic()
            subprocess.run(["kill", "-TERM", str(process_of(service))], check=True)
            code = service.wait(float(grace.removesuffix("s")))
            print(f"SIGTERM: ended with {code} after {time.monotonic() - began:.1f} s")
        finally:
            if service.poll() is None:  # all of it: what changes its user does not end with its parent
                subprocess.run(["kill", "-KILL", str(process_of(service))], check=False)
            service.kill()
            service.wait()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
