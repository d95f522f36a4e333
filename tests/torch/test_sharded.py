"""A trainer of two ranks over gloo publishes its steps: whatever fails or is killed, rows served are the trainer's."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrec", reason="TorchRec is not installed: make trainers")

import torch
from torchrec.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule

import tierstore
from tests.cli.conftest import SMALL
from tests.counts import with_large_counts
from tests.redis_cluster import free_ports
from tierstore.errors import InvalidInput
from tierstore.service.server import ServerThread
from tierstore.torch import ShardedPublisher

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]  # every rank imports TorchRec, four times a test
ROOT = Path(__file__).parents[2]


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with (
        tierstore.open(tmp_path / "data", port=0, source_root=[tmp_path], **SMALL) as store,
        ServerThread(store) as server,
    ):
        yield server.url


def run(url: str, directory: Path, steps: int, fault: str = "none") -> tuple[list[int], str]:
    """Exit codes of both ranks, and what they said. As torchrun does, one that dies ends the other."""
    words = [str(free_ports(1)[0]), url, str(directory), str(steps), fault]
    log = directory / f"{fault}.log"
    with log.open("wb") as out:
        command = [sys.executable, "-W", "ignore", "-m", "tests.torch.sharded_ranks"]
        ranks = [subprocess.Popen([*command, str(rank), *words], cwd=ROOT, stdout=out, stderr=out) for rank in (0, 1)]
        try:
            died = fault.endswith(("dies", "before", "after"))
            first = 1 if fault == "rank1-dies" else 0
            for rank in (ranks[first], ranks[1 - first]):
                if died and rank is ranks[1 - first]:
                    rank.kill()
                rank.wait(300)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return [rank.returncode for rank in ranks], log.read_text()


@pytest.mark.parametrize(
    "fault",
    [*(pytest.param(one, marks=with_large_counts) for one in ("rank1-dies", "rank0-dies-before")), "rank0-dies-after"],
)
def test_a_job_that_died_goes_on_from_its_checkpoint_and_the_service_has_its_rows(
    tmp_path: Path, url: str, fault: str
) -> None:
    """The steps after the checkpoint were served and are trained otherwise now: no row of theirs is left."""
    codes, said = run(url, tmp_path, 8, fault)
    assert codes[1 if fault == "rank1-dies" else 0] == -signal.SIGKILL, said
    assert (tmp_path / "latest").read_text() == "3"
    codes, said = run(url, tmp_path, 8)
    assert codes == [0, 0], said
    assert not list((tmp_path / "journal").glob("*.arrow")), "nothing is unsent"


class Tracked(torch.nn.Module):
    """What is asked of a model before its ranks are."""

    def __init__(self, tracker: object, **parts: torch.nn.Module) -> None:
        super().__init__()
        self.get_delta_tracker = lambda: tracker
        for name, part in parts.items():
            self.add_module(name, part)


def test_a_model_without_a_tracker_or_whose_rows_are_slots_is_refused(tmp_path: Path) -> None:
    for model in (torch.nn.Linear(1, 1), Tracked(None)):
        with pytest.raises(InvalidInput, match=r"model.init_torchrec_delta_tracker\(DeltaTrackerConfig\(\)\) first"):
            ShardedPublisher(model, "ctr", None, journal=tmp_path / "journal")
    options: dict[str, Any] = {"zch_size": 8, "device": torch.device("cpu"), "eviction_interval": 1}
    options["eviction_policy"] = LFU_EvictionPolicy()
    with pytest.raises(InvalidInput, match="table 'item' has managed collisions"):
        ShardedPublisher(
            Tracked(object(), item=MCHManagedCollisionModule(**options)), "ctr", None, journal=tmp_path / "journal"
        )


def test_rows_of_a_publish_that_failed_are_in_the_next(tmp_path: Path, url: str) -> None:
    """Whether the service has had the delta or not: training goes on, and nothing is lost or refused."""
    codes, said = run(url, tmp_path, 7, "unreachable")
    assert codes == [0, 0], said
