"""Watched locations: the newest snapshot is loaded once it is complete, and becomes what the policy says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tierstore
from tests.service.conftest import eventually, settings_for
from tests.service.scenes import write_snapshot
from tierstore.config import SnapshotPolicy, load_settings
from tierstore.engine.store import Store
from tierstore.errors import ConfigError
from tierstore.service.limits.jobs import Jobs
from tierstore.service.server import ServerThread, check_settings
from tierstore.service.sources.locations import Locations
from tierstore.service.stats import InferenceStats, Timings
from tierstore.verdicts import CanaryTrial, Requests, judge


class Watched:
    """A store, and a location that is watched for it."""

    def __init__(
        self, root: Path, location: Path | str | None = None, second: Path | None = None, **settings: Any
    ) -> None:
        self.root = root
        self.location = root / "location"
        self.location.mkdir(exist_ok=True)
        locations = [location or self.location, *([] if second is None else [second])]
        self.settings = settings_for(root, watch_snapshots=locations, **settings)
        self.start()

    def start(self) -> None:
        self.store = Store(self.settings)
        self.jobs = Jobs(self.store)
        self.stats = InferenceStats(self.store.lookup_times)
        self.watch()

    def watch(self) -> None:
        self.source = Locations(self.store, self.jobs, self.stats, self.settings, poll_s=0.02)

    def stop(self) -> None:
        self.source.close()
        self.jobs.close()
        self.store.close()

    def put(self, version: int, place: str | None = None, **content: Any) -> Path:
        """A complete snapshot appears: its manifest comes last."""
        made = write_snapshot(self.root, version, shift=float(version), **content)
        where = self.location / (place or f"ctr/{version}")
        where.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(where, ignore_errors=True)
        shutil.copytree(made, where, ignore=shutil.ignore_patterns("snapshot.json"))
        shutil.move(made / "snapshot.json", where / "snapshot.json")
        shutil.rmtree(made)
        return where

    @property
    def active(self) -> int | None:
        return self.store.model("ctr").active_version if "ctr" in self.store.models() else None

    @property
    def record(self) -> dict[str, Any]:
        document: dict[str, Any] = self.source.status()["models"].get("ctr", {})
        return document

    def expect(self, version: int | None) -> None:
        eventually(lambda: self.active == version, f"version {version} to be active; {self.source.status()}")

    def expect_last(self, words: str) -> None:
        eventually(lambda: words in (self.record.get("last") or ""), f"{words!r}; {self.source.status()}")

    def expect_problem(self, words: str) -> None:
        eventually(lambda: any(words in text for text in self.source.problems()), f"{words!r}; {self.source.status()}")

    def looks(self, times: int = 3) -> None:
        """Wait until the location was looked at so often from now on."""
        for _ in range(times):
            before = self.source.status()["locations"][0]["looked_at"]
            eventually(lambda b=before: self.source.status()["locations"][0]["looked_at"] != b, "another look")


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    scene = Watched(tmp_path)
    yield scene
    scene.stop()


@pytest.fixture
def canaries(tmp_path: Path) -> Iterator[Watched]:
    scene = Watched(
        tmp_path, snapshot_policies={"*": {"watch_activate": "canary", "canary_share": 0.25, "canary_minutes": 1000}}
    )
    scene.put(1)
    scene.expect(1)
    yield scene
    scene.stop()


def test_the_newest_is_loaded_when_it_is_complete(watched: Watched) -> None:
    watched.put(3)
    watched.put(2)
    watched.expect(3)
    watched.put(4)
    watched.expect(4)
    assert watched.store.model("ctr").versions == [3, 4], "an older one is not loaded"
    unfinished = watched.put(5, "../outside/5")
    (unfinished / "snapshot.json").rename(unfinished / "later")
    (watched.location / "ctr/5").mkdir()
    shutil.copytree(unfinished, watched.location / "ctr/5", dirs_exist_ok=True)
    watched.looks()
    assert (watched.active, watched.source.problems()) == (4, [])
    (watched.location / "ctr/5/later").rename(watched.location / "ctr/5/snapshot.json")
    watched.expect(5)
    assert watched.source.loaded == 3
    assert watched.source.errors == 0


def test_folders_may_have_other_names_and_hold_built_versions(watched: Watched, tmp_path: Path) -> None:
    watched.put(7, "2026-11-22")
    watched.expect(7)
    made = write_snapshot(tmp_path, 8)
    tierstore.build_snapshot(made, watched.location / "built-8", load_workers=1)
    watched.expect(8)
    watched.put(9, "ctr/nine")
    watched.expect(9)
    made = write_snapshot(tmp_path, 10)
    tierstore.build_snapshot(made, watched.location / "built-10", partitions=4, load_workers=1)
    watched.expect(10)


def test_two_locations_that_have_the_same_load_it_once(tmp_path: Path) -> None:
    watched = Watched(tmp_path, second=tmp_path / "location")
    try:
        watched.put(1)
        watched.expect(1)
        watched.looks()
        assert (watched.source.loaded, watched.source.errors, watched.source.problems()) == (1, 0, [])
    finally:
        watched.stop()


def test_one_that_is_held_waits_for_a_person(tmp_path: Path) -> None:
    watched = Watched(tmp_path, snapshot_policies={"ctr": {"watch_activate": "hold"}})
    try:
        watched.put(1)
        watched.expect_last("kept, as the policy says")
        assert (watched.active, watched.store.model("ctr").versions) == (None, [1])
        watched.store.activate("ctr", 1)
        watched.looks()
        assert watched.active == 1
    finally:
        watched.stop()


def test_what_a_person_rolled_back_stays_so_until_something_newer_comes(watched: Watched) -> None:
    for version in (1, 2):
        watched.put(version)
        watched.expect(version)
    watched.store.rollback("ctr")
    watched.looks()
    assert watched.active == 1
    watched.stop()
    watched.start()
    watched.store.drop("ctr", 2)
    watched.looks()
    assert watched.store.model("ctr").versions == [1], "it is not loaded a second time"
    watched.put(3)
    watched.expect(3)


def test_what_a_person_has_loaded_is_left_to_that_person(watched: Watched) -> None:
    watched.put(1)
    watched.expect(1)
    watched.source.close()
    where = watched.put(2)
    watched.store.load_snapshot(where, activate=False)
    watched.watch()
    watched.expect_last("was there already")
    assert watched.active == 1


def test_a_version_that_became_active_during_the_load_stays_active(watched: Watched, tmp_path: Path) -> None:
    watched.put(1)
    watched.expect(1)
    begun = watched.jobs.submit

    def submit(*args: Any, **options: Any) -> Any:
        if watched.active == 1:
            watched.store.load_snapshot(write_snapshot(tmp_path, 9))
        return begun(*args, **options)

    watched.jobs.submit = submit  # type: ignore[method-assign]
    watched.put(2)
    watched.expect_last("version 9 was made active meanwhile")
    assert watched.active == 9


def test_a_restart_goes_on_with_what_was_pending(watched: Watched) -> None:
    watched.put(1)
    watched.expect(1)
    watched.source.close()
    watched.store.load_snapshot(watched.put(2), activate=False)
    path = watched.store.root.watched
    document = json.loads(path.read_text())
    document.pop("xxh3")
    document["models"]["ctr"] |= {"pending": 2, "beside": 1}
    path.write_text(json.dumps(document))
    watched.stop()
    watched.start()
    watched.expect(2)
    assert watched.source.loaded == 0, "it was loaded before"
    path.write_text("{")
    watched.stop()
    watched.start()
    watched.looks()
    assert watched.active == 2


def test_a_bad_one_is_reported_and_tried_again_when_it_changes(watched: Watched) -> None:
    watched.put(1)
    watched.expect(1)
    good = watched.put(2, "../outside/2")
    manifest = json.loads((good / "snapshot.json").read_text())
    manifest["tables"][0]["shards"][0]["xxh3"] = "0" * 16
    (good / "snapshot.json").write_text(json.dumps(manifest))
    good.rename(watched.location / "ctr/2")
    watched.expect_problem("wrong checksum")
    (watched.location / "ctr/2/snapshot.json").rename(watched.location / "ctr/2/hidden")
    eventually(lambda: not watched.source.problems(), "what is no snapshot any more to be no problem")
    (watched.location / "ctr/2/hidden").rename(watched.location / "ctr/2/snapshot.json")
    watched.expect_problem("wrong checksum")
    assert watched.active == 1
    errors = watched.source.errors
    watched.looks(5)
    assert watched.source.errors <= errors + 3, "it is not tried over and over"
    watched.put(2)
    watched.expect(2)
    eventually(lambda: not watched.source.problems(), "no problem to be left")


def test_a_folder_that_is_no_snapshot_or_another_models(watched: Watched) -> None:
    watched.put(1, "other/1")
    watched.expect_problem("expected a snapshot of model 'other', got one of 'ctr'")
    (watched.location / "ctr/5").mkdir(parents=True)
    (watched.location / "ctr/5/snapshot.json").write_text("[]")
    watched.expect_problem("is invalid")
    watched.put(2)
    watched.expect(2)


def test_a_canary_is_promoted_after_its_minutes(canaries: Watched) -> None:
    canaries.put(2)
    canaries.expect_last("is the canary")
    served = canaries.store.model("ctr").served
    assert served.canary is not None
    assert (served.canary.version, served.share) == (2, 0.25)
    canaries.put(3)
    canaries.looks()
    assert canaries.record["canary"] == 2, "the trial goes on"
    canaries.stop()
    at_once = SnapshotPolicy(watch_activate="canary", canary_minutes=0.0)
    canaries.settings = canaries.settings.model_copy(update={"snapshot_policies": {"ctr": at_once}})
    canaries.start()
    canaries.expect(3)


def test_a_canary_that_fails_is_withdrawn_and_reported(canaries: Watched) -> None:
    canaries.put(2)
    canaries.expect_last("is the canary")
    eventually(lambda: "ctr" in canaries.source._trials, "the trial to begin")
    for _ in range(50):
        canaries.stats.succeeded("ctr", 1, 1000, Timings())
    for _ in range(3):
        canaries.stats.failed("ctr", 2, 1000, "error")
    canaries.expect_problem("version 2 was the canary and is withdrawn: ")
    canaries.looks()
    served = canaries.store.model("ctr").served
    assert served.canary is None
    assert canaries.active == 1
    assert canaries.store.model("ctr").versions == [1, 2]
    canaries.put(3)
    canaries.expect_last("version 3 is the canary")
    assert canaries.source.problems() == []


def test_a_canary_that_a_person_withdraws_or_promotes_is_not_followed_any_more(canaries: Watched) -> None:
    canaries.put(2)
    canaries.expect_last("is the canary")
    canaries.store.withdraw("ctr")
    canaries.expect_last("no longer the canary")
    canaries.looks()
    assert canaries.active == 1
    assert canaries.store.model("ctr").served.canary is None
    canaries.put(3)
    canaries.expect_last("version 3 is the canary")
    canaries.store.promote("ctr")
    canaries.expect_last("version 3 is active")


@pytest.mark.parametrize(
    ("canary", "active", "verdict"),
    [
        ((0, 0), (0, 0), "good"),
        ((500, 0), (9500, 0), "good"),
        ((500, 1), (9500, 0), "doubtful"),
        ((500, 2), (9500, 0), "bad"),
        ((500, 5), (9500, 95), "good"),
        ((500, 50), (9500, 95), "bad"),
        ((3, 1), (0, 0), "doubtful"),
        ((3, 3), (0, 0), "bad"),
        ((1, 1), (40, 0), "doubtful"),
    ],
)
def test_the_verdict(canary: tuple[int, int], active: tuple[int, int], verdict: str) -> None:
    assert judge(Requests(*canary), Requests(*active)) == verdict


def test_the_minutes_begin_again_with_a_doubt_and_wait_for_requests() -> None:
    none = Requests()
    assert CanaryTrial(none, none).look(none, none, 0)[0] == "good"
    assert CanaryTrial(none, none).look(none, Requests(10), 0)[0] == "doubtful", "it was not tried yet"
    trial = CanaryTrial(none, none)
    trial.good_since_s -= 120
    assert trial.look(Requests(10, 1), Requests(10_000), 1)[0] == "doubtful"
    trial.good_since_s -= 120
    assert trial.look(Requests(10, 1), Requests(10_000), 1)[0] == "good", "no more of them for a minute"
    assert trial.look(Requests(10, 2), Requests(10_000), 1)[0] == "bad"
    assert CanaryTrial(Requests(10, 9), none).look(Requests(20, 9), none, 0)[0] == "good", "only what came since"


def test_the_service_shows_what_it_watches(tmp_path: Path) -> None:
    location = tmp_path / "location"
    location.mkdir()
    with pytest.raises(ConfigError, match="is not a directory"):
        check_settings(settings_for(tmp_path, watch_snapshots=[tmp_path / "none"]))
    with pytest.raises(ConfigError, match="expected a directory or a URL"):
        check_settings(settings_for(tmp_path, watch_snapshots=["http://bucket/models"]))
    with pytest.raises(ConfigError, match="watch_activate"):
        load_settings(None, snapshot_policies={"ctr": {"watch_activate": "soon"}})
    settings = settings_for(tmp_path, grpc_port="off", watch_snapshots=[location], watch_snapshots_s=0.05)
    shutil.copytree(write_snapshot(tmp_path, 5), location / "ctr/5")
    (location / "ctr/6").mkdir()
    (location / "ctr/6/snapshot.json").write_text("no JSON")
    with (
        Store(settings) as store,
        ServerThread(store) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):

        def shown() -> Any:
            service = http.get("/admin/models").json()["service"]
            return service if (service["watch_snapshots"]["models"].get("ctr") or {}).get("seen") == 5 else None

        service = eventually(shown, "the version to be loaded")
        assert any("is invalid" in problem for problem in service["problems"]), service
        assert "tierstore_watched_snapshots_loaded_total 1.0" in http.get("/metrics").text
        assert http.get("/admin/jobs").json()["jobs"][0]["state"] == "done"


def test_a_snapshot_whose_golden_examples_differ_is_not_loaded(watched: Watched, tmp_path: Path) -> None:
    def put(version: int, off: float) -> None:
        where = watched.location / str(version)
        with tierstore.SnapshotWriter(where, model="ctr", version=version) as writer:
            writer.table("item", dim=2).write([1, 2], [[1.0, 2.0], [3.0, 4.0]])
            writer.golden({"item": [1]}, {"item": [[1.0 + off, 2.0]]})

    put(1, 0.0)
    watched.expect(1)
    put(2, 1.0)
    watched.expect_problem("golden example 0: the rows of feature 'item'")
    assert watched.active == 1
