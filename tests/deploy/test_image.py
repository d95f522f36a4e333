"""The image is built, started without root, loaded from what is mounted and from what is sent to it, asked and stopped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

import tierstore
from tests.deploy import image
from tests.engine.scenes import eventually
from tools.elsewhere import program

ROOT = image.ROOT
LOOKUP = """
import tierstore
with tierstore.Client("http://127.0.0.1:8000") as client:
    client.load_snapshot("/snapshots/1", model="m")
    print(client.lookup("m", "item", [3]).tolist())
"""
MISSING = [name for name in image.PROGRAMS if shutil.which(name) is None]


@pytest.mark.thorough
@pytest.mark.timeout(3000)
@pytest.mark.skipif(bool(MISSING), reason=f"needs Debian's {', '.join(MISSING)}")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which makes the base and the image")
def test_the_image_is_built_served_without_root_and_stopped_in_time(tmp_path: Path) -> None:
    grace = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["x-node"]["stop_grace_period"]
    table = {"key": [3], "vector": [[3.0, 3.0]]}
    tierstore.import_table(table, model="m", table="item", out=tmp_path / "snapshots/1", version=1)
    with image.images() as images:
        images.make_base("localhost/base")
        images.build("localhost/tierstore", "localhost/base")
        container, snapshots = images.container("localhost/tierstore"), tmp_path / "snapshots"
        with (tmp_path / "log").open("wb") as log:
            line = image.alone(images.run(container, snapshots, image.command()))
            service = subprocess.Popen(line, stdout=log, stderr=log)
        try:

            def inside(command: list[str]) -> subprocess.CompletedProcess[str]:
                line = image.beside(service.pid, images.run(container, snapshots, command))
                return subprocess.run(line, capture_output=True, text=True, timeout=120)

            def is_healthy() -> bool:
                assert service.poll() is None, (tmp_path / "log").read_text()
                return inside(image.health_check()).returncode == 0

            eventually(is_healthy, "the health check passes", timeout_s=120, pause_s=0.5)
            answer = inside(["python", "-c", LOOKUP])
            assert answer.stdout == "[[3.0, 3.0]]\n", answer.stderr
            (tmp_path / "work").mkdir()
            line = program(["http://127.0.0.1:8000"], tmp_path / "work", None, rows=3000)
            sent = subprocess.run(image.beside(service.pid, line), capture_output=True, text=True, timeout=300)
            assert sent.returncode == 0, sent.stderr
            assert "the first snapshot is sent" in sent.stdout
            assert "the next is imported, and every row read back" in sent.stdout
            began = time.monotonic()
            (process, *_) = image.of_the_user(service.pid)
            os.kill(process, signal.SIGTERM)
            assert service.wait(float(grace.removesuffix("s"))) == 0, (tmp_path / "log").read_text()
            print(f"stopped after {time.monotonic() - began:.1f} s")
        finally:
            if service.poll() is None:
                for process in reversed([service.pid, *image.descendants(service.pid)]):
                    os.kill(process, signal.SIGKILL)
                service.wait(60)
        said = (tmp_path / "log").read_text()
        assert "compiling" not in said.lower(), "kernels are in the image"
        assert image.written(images.files(container)) <= {"data"}
