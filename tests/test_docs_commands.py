"""Every command line and program of README and docs is run, in the order of its page; what cannot be is in `NOT_RUN`, with the reason.

A page is played in a directory of its own, beside a real service. Addresses and absolute paths are those of the test; nothing else of a
line is changed. What a line needs first (the version that it drops, say) is there: `prepare` sees to it.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tierstore
from tests import certificates
from tests.formats.object_server import ObjectServer
from tests.imports.test_checkpoints import safetensors
from tests.imports.test_hps import hps
from tests.redis_cluster import SERVER as REDIS_SERVER
from tests.redis_cluster import Server, free_ports, redis_cluster
from tests.test_docs import ENV_PREFIX, ITEMS, ROOT, SMALL, alone, blocks, command, data, names, snapshot, vectors
from tierstore.config import load_settings
from tierstore.service.server import ServerThread

PIP = "installs packages; `make dist` installs the wheel with its extras into a fresh environment"
KAFKA = "needs a Kafka cluster; tests/service/sources/test_kafka.py and test_kafka_rows.py start the service with one, and park messages"
NOT_RUN = {  # the beginning of a line, or of a program → why
    "for node in a b c; do tierstore load": "needs three nodes; tests/engine/placements/cluster/test_load_parts.py shares a load",
    'snapshot.feature("word", table="word", hash=tierstore.hash_like': "a line of a program; tests/formats/test_trainer_hash.py does so",
    "kubectl port-forward": "needs a cluster; tests/client/test_rollout.py sends a snapshot to nodes",
    "tierstore rollout snapshots/ctr/20261120 --nodes http://127.0.0.1:8100": "the same",
    "make demo": "runs `tierstore demo`, as tests/demo does",
    "make test": "runs this file among others",
    "make bench": "measures for minutes; tests/test_benchmarks.py runs each benchmark, small",
    "pip install": PIP,
    "pip uninstall": PIP,
    "docker build": "`make image-test` builds and runs the image",
    "kubectl create": "needs Kubernetes",
    "helm install": "needs Kubernetes; tests/deploy/test_helm.py renders the chart",
    "tierstore serve --device-budget": "needs a GPU",
    "TIERSTORE_DENSE_PROVIDER=cuda": "needs a GPU",
    "docker compose up": "needs a container engine; tests/deploy checks the file",
    "kubectl apply": "needs Kubernetes; tests/deploy checks the manifests",
    "tierstore load /snapshots/ctr/20261120 --model ctr --url http://127.0.0.1:8000": "is of a container's path",
    "tierstore bench": "measures for half a minute; tests/test_bench.py runs it, small",
    "tierstore demo": "takes a minute; tests/demo runs it",
    "tierstore compile": "compiles all kernels; tests/conftest.py does it first",
    "tierstore jobs --url http://127.0.0.1:8000 --cancel": "needs a job under way; tests/service/admin cancel one",
    "tierstore jobs --url http://127.0.0.1:8000 --acknowledge": "needs a failed load; tests/service/admin acknowledge one",
    "make gpu-bundle": "downloads wheels; tests/test_gpu_bundle.py looks at what it would download",
    "tools/on_card.sh": "takes minutes on a GPU; tests/test_gpu_bundle.py runs it without one",
    "tierstore plan --from": "needs minutes of look-ups; tests/cli/test_caches.py plans by what a service has measured",
    "tierstore serve --data /var/lib/tierstore --kafka": KAFKA,
    "tierstore parked show": KAFKA,
    "tierstore parked retry": KAFKA,
    "tierstore parked skip": KAFKA,
    "with tierstore.KafkaDeltaWriter": "tests/service/sources/test_kafka.py runs it",
    "import json\nfrom confluent_kafka": "tests/service/sources/test_kafka_rows.py runs it",
    "rows = ctr.lookup(\"item_id\", keys, device=\"gpu\")": "needs a GPU",
    "import grpc, numpy as np, tensorflow": "needs TensorFlow; tests/interop sends the same",
    "# LightGBM: its own": "needs LightGBM; test_docs.py runs it where that is",
    "# XGBoost: a class": "needs XGBoost; test_docs.py runs it where that is",
    "# CatBoost: writes": "needs CatBoost; test_docs.py runs it where that is",
    "# scikit-learn: by": "needs skl2onnx; test_docs.py runs it where that is",
    "# Keras: the layers": "needs Keras; test_docs.py runs it where that is",
    "graph = onnxmltools": "needs LightGBM; examples/lightgbm_with_embeddings.py does it",
    "from tierstore.torch import": "needs PyTorch; test_docs.py runs it where that is",
    'import tierstore\n\nwith tierstore.SnapshotWriter("template"': "shows calls of many tasks; tests/ingest/test_partitioned.py and test_engines.py run whole builds",
    "import numpy as np\nimport tensorflow as tf\nimport tierstore": "needs TFRA; tests/interop/test_tfra.py runs it where that is",
    "tierstore import warehouse/items": "needs a table with a log; tests/imports/test_lake_tables.py and tests/cli/test_commands.py import such",
    "import numpy\nimport tensorflow": "needs TensorFlow; tests/imports/test_trainers_programs.py runs such lines",
    "import jax\nimport numpy\nimport orbax.checkpoint": "needs Orbax; the same",
    "item = Entity(": "needs Feast; tests/interop/test_feast.py does the same",
    "store.get_online_features(": "the same",
    "tierstore lookup shop-items": "the same",
    "for name, (codes, scale, bias)": "needs FBGEMM; tests/torch/test_fbgemm.py does the same",
    "from torch import nn": "needs PyTorch; test_docs.py runs it where that is",
    "import torch\n": "needs PyTorch; test_docs.py runs it where that is",
    "from torchrec.distributed": "needs ranks; tests/torch/test_sharded.py starts two that do this",
    "from dynamicemb": "needs a GPU; tests/torch/test_incremental.py gives what it returns",
    "write_snapshot(": "needs TorchRec; test_docs.py runs it where that is",
}  # fmt: skip
PAGES = ["README.md", *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))]
ALL_INPUTS = "user_id item_id clicked hour"
DENSE = {  # page → inputs of its model, where it has others
    "docs/formats.md": "item_id clicked", "docs/import.md": "item_id clicked", "docs/cli.md": "item_id clicked",
    "docs/several-nodes.md": "item_id user_id", "docs/http-api.md": "", "docs/grpc-api.md": "", "docs/tensorflow-serving.md": "",
}  # fmt: skip
Item = tuple[int, str, str]  # line, kind (sh or python), text


def items(page: str) -> list[Item]:
    """The command lines and programs of a page, in its order."""
    found: list[Item] = [(line, "python", text) for line, text in blocks(page, "python")]
    for line, text in blocks(page, "sh", "bash", "console"):
        shown = re.sub(r"\\\n", " ", text)
        found += [
            (line, "sh", one.strip()) for one in shown.splitlines() if one.strip() and not one.strip().startswith("#")
        ]
    return sorted(found, key=lambda item: item[0])


def test_blocks_of_commands_say_so() -> None:
    """Else they would be neither highlighted nor run."""
    programs = "|".join(("tierstore", "make", "pip", "curl", "docker", "kubectl", "helm", "export", "python"))
    assert [
        page
        for page in PAGES
        if re.search(rf"^ *```\n *({programs}) ", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    ] == []


def why_not(text: str) -> str | None:
    """The beginning, listed in `NOT_RUN`, of what is not run. The longest counts."""
    return max((start for start in NOT_RUN if text.startswith(start)), key=len, default=None)


def test_what_is_not_run_is_on_a_page_and_nothing_else_is_left_out() -> None:
    everything = [text for page in PAGES for _, _, text in items(page)]
    assert {start for start in NOT_RUN if not any(why_not(text) == start for text in everything)} == set()
    assert len(everything) > 150
    assert sum(why_not(text) is None for text in everything) > 110


class Scene:
    """A directory with a reader's data, a service, and others beside it as soon as a page names them."""

    def __init__(self, root: Path, page: str, stack: ExitStack) -> None:
        self.root, self.page, self.stack = root, page, stack
        self.dense = DENSE.get(page, ALL_INPUTS)
        self._nodes: dict[str, ServerThread] = {}
        self._serving: list[subprocess.Popen[str]] = []
        self.written: set[str] = set()  # snapshots
        self._served = ""  # the URL of what a page has started
        self.as_left = False  # the page makes all that it needs

    def node(self, name: str = "a") -> ServerThread:
        """A service that has the snapshot of the day before the pages'."""
        if name not in self._nodes:
            (self.root / "before").exists() or snapshot(self.root / "before", 20261119, self.dense)
            where = {"source_root": [self.root], "export_root": self.root / f"exported-{name}"}
            settings = {**SMALL, **where, "port": 0, "grpc_port": 0, "allow_client_shm": True, "keep_versions": 4}
            store = self.stack.enter_context(tierstore.open(self.root / f"served-{name}", **settings))
            server = self.stack.enter_context(ServerThread(store))
            if self.page != "docs/import.md":  # which begins with nothing
                store.load_snapshot(self.root / "before")
            self._nodes[name] = server
        return self._nodes[name]

    def here(self, text: str) -> str:
        """`text` with the test's addresses and paths."""
        text = re.sub(r"\$URL\b", "http://127.0.0.1:8000", text)
        text = re.sub(r"(?:node-)?\b([abc]):8000\b|tierstore-([01])\.tierstore:8000", self._address, text)
        if "redis://" in text:
            text = text.replace("redis://h1:6379,h2:6379", self.stack.enter_context(redis_cluster()).url)
        text = re.sub(
            r"(?:127\.0\.0\.1|localhost):8000\b", lambda _: (self._served or self.node().url).partition("//")[2], text
        )
        text = re.sub(r"127\.0\.0\.1:8001\b", lambda _: str(self.node().grpc_target), text)
        return re.sub(
            r"(?<![\w./~])/(srv|mnt|var|nvme|run|etc|snapshots|data)(?=/|\b)",
            lambda path: f"{self.root}/{path[1]}",
            text,
        )

    def _address(self, name: re.Match[str]) -> str:
        return self.node(name[1] or "ab"[int(name[2])]).url.removeprefix("http://")

    # --- command lines

    def shell(self, line: str) -> None:
        words = shlex.split(self.here(line), comments=True)
        if words[0] == "export":
            for name, value in (word.split("=", 1) for word in words[1:]):
                os.environ[name] = value  # of this block: the test puts the environment back
            load_settings()
        elif words[0] == "curl":
            shutil.which("curl") or pytest.skip("no curl here")
            done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
            assert '"error"' not in done.stdout, done.stdout
        else:
            assert words[0] == "tierstore", f"{line}: neither run nor in NOT_RUN"
            if not any(word.startswith(("unix:", "http:")) for word in words):
                self.stop()
            if not self.as_left:
                self.prepare(words)
            if words[1] == "serve":
                self.serve(words)
            else:
                command(shlex.join(words))

    def serve(self, words: list[str]) -> None:
        """Run a service until the next command line, once it answers."""
        self.stop()
        for name in ("tokens.json", "tokens.json.lock"):
            (self.root / "data" / name).unlink(missing_ok=True)  # of lines before: a page's parts stand for themselves
        words = [re.sub(r"^8000$", "0", word) for word in words[1:]]
        if "--tls-cert" in words:
            authority = certificates.Authority(self.root, "clients")
            pair = authority.issue("tls")
            assert {pair.cert, pair.key, authority.ca} >= {
                self.root / word for word in words if word.endswith((".pem", ".key"))
            }
        environment = os.environ | {"TIERSTORE_DRAIN_S": "0", "PYTHONPATH": str(ROOT)}
        environment |= {"TIERSTORE_PORT": "0"} if "--port" not in words else {}
        process = subprocess.Popen(
            [sys.executable, "-m", "tierstore", *words], stdout=subprocess.PIPE, text=True, env=environment
        )
        self._serving.append(process)
        assert process.stdout is not None
        said = process.stdout.readline()
        (address,) = re.findall(r"https?://[\d.:]+", said)[:1] or [""]
        assert address, f"{words}: {said!r}"
        self._served = address

    def stop(self) -> None:
        self._served = ""
        while self._serving:
            process = self._serving.pop()
            process.terminate()
            assert process.wait(60) in (0, 143)

    # --- what a line needs first

    def prepare(self, words: list[str]) -> None:
        verb, *rest = words[1:]
        values = {i + 1 for i, word in enumerate(rest) if word.startswith("--") and word not in FLAGS}
        plain = [word for i, word in enumerate(rest) if not word.startswith("-") and i not in values]
        folder = Path(rest[rest.index("--data") + 1]) if "--data" in rest else Path("data")
        match verb:
            case "rollout":
                self.snapshot(plain[0])
            case "restore":
                shutil.rmtree(folder, ignore_errors=True)
                with tierstore.open(self.local(Path("backed-up")), **SMALL) as store:
                    for _ in range(3):
                        store.backup("ctr", plain[0], keep=9)
            case "import-hps":
                for place in (".", "mnt"):
                    shutil.rmtree(self.root / place / "models", ignore_errors=True)
                    shutil.copytree(self.hps, self.root / place / "models", dirs_exist_ok=True)
                (self.root / "etc/hps").mkdir(parents=True, exist_ok=True)
                for place in (".", "etc/hps"):
                    shutil.copy(self.hps / "ps.json", self.root / place)
            case "import":
                ((_, text),) = blocks("docs/import.md", "toml")
                Path("tables.toml").write_text(text)
            case "token" if plain[0] == "revoke":
                words[words.index(plain[1])] = json.loads(Path("data/tokens.json").read_text())["tokens"][0]["id"]
            case "delta":
                for name in plain:
                    self.delta(Path(name)) if name.endswith(".arrow") else self.rows(Path(name), rest)
            case "load" | "build":
                self.snapshot(plain[0])
        if verb in ("build", "export", "triton-model", "import", "import-hps"):
            for new in (
                plain[-1] if verb in ("build", "export", "triton-model") else None,
                *_value(rest, "--out", "--triton"),
            ):
                shutil.rmtree(new, ignore_errors=True) if new else None
        if verb in WITH_STATE:
            url = next(iter(_value(rest, "--url")), None)
            if url is not None and (url.startswith("unix:") or url == self._served):
                return  # of a service that the page has started, with what it has brought there
            if url is None and verb == "load":
                shutil.rmtree(folder, ignore_errors=True)
                return
            with (
                tierstore.Client(url, timeout_s=120)
                if url
                else tierstore.open(self.local(folder), **SMALL, keep_versions=4) as place
            ):
                self.bring(place, verb, plain, rest)

    def bring(self, place: Any, verb: str, plain: list[str], rest: list[str]) -> None:
        """The state of `ctr` that a line begins with."""

        def status() -> dict[str, Any]:
            return dict(place.status("ctr")["models"]["ctr"])

        def have(version: int) -> None:
            if version not in {one["version"] for one in status()["versions"]}:
                self.snapshot(where := self.root / f"snapshots/ctr/{version}")
                place.load_snapshot(where, activate=False)

        def active(version: int) -> None:
            have(version)
            if status()["canary"] is not None:
                place.withdraw("ctr")
            if status()["active_version"] != version:
                place.activate("ctr", version, force=True)

        def applied(seq: int) -> None:
            for one in range(status()["watermark"] + 1, seq + 1):
                self.delta(where := self.root / f"deltas/{one}.arrow")
                place.apply_delta(where)

        match verb:
            case "activate":
                have(int(plain[1]))
            case "drop" | "load":
                version = int(re.findall(r"\d+", plain[-1])[-1])
                active(20261122)
                if verb == "drop":
                    have(version)
                elif version in {one["version"] for one in status()["versions"]}:
                    place.drop("ctr", version)
            case "canary":
                if (status()["canary"] or {}).get("version") != int(plain[1]):
                    active(20261119)
                    have(int(plain[1]))
            case "promote" | "withdraw":
                active(20261119)
                have(20261121)
                place.canary("ctr", 20261121)
            case "label":
                active(20261120)
                if "--remove" in rest:
                    place.label("ctr", plain[1], 20261120)
            case "rollback":
                (expected,), (seq,) = (
                    _value(rest, "--expected-active") or ["20261121"],
                    _value(rest, "--to-seq") or [None],
                )
                have(20261119)
                active(int(expected))
                if seq is not None:
                    applied(int(seq) + 1)
            case "delta":
                seqs = _value(rest, "--seq") or [Path(plain[0]).stem]
                if seqs[0].isdecimal():  # else it takes the next
                    applied(int(seqs[0]) - 1)
        if _value(rest, "--version") == ["canary"]:
            active(20261119)
            have(20261121)
            place.canary("ctr", 20261121)

    def snapshot(self, where: Path | str) -> None:
        """Write the snapshot that is named, where it is not there: its version is the last part of the name."""
        if str(where) in self.written:
            return
        if (digits := Path(where).name.replace("-", "")).isdecimal() and not {"built", "exports"} & set(
            Path(where).parts
        ):
            shutil.rmtree(where, ignore_errors=True)  # what another line has made there
            snapshot(where, int(digits), self.dense)
            self.written.add(str(where))

    def delta(self, where: Path) -> None:
        where.parent.mkdir(parents=True, exist_ok=True)
        if not where.exists():
            seq = int(where.stem)
            with tierstore.DeltaWriter(where, model="ctr", seq=seq) as writer:
                writer.upsert("item", [17], np.full((1, 32), seq % 100, np.float32))

    def rows(self, where: Path, rest: list[str]) -> None:
        """Write the file of rows that a line names, or one into its directory."""
        columns = {
            "".join(_value(rest, "--key")) or "key": [17],
            "".join(_value(rest, "--vector")) or "vector": [[1.0] * 32],
        }
        columns |= {name: ["item"] for name in _value(rest, "--table-column")}
        if not where.suffix:
            where.mkdir(exist_ok=True)
            where = where / "rank-0.parquet"
        pd.DataFrame(columns).to_parquet(where)

    def local(self, folder: Path) -> Path:
        """A data directory with the snapshot of the day before."""
        if not folder.exists():
            (self.root / "before").exists() or snapshot(self.root / "before", 20261119, self.dense)
            with tierstore.open(folder, **SMALL, keep_versions=4) as store:
                store.load_snapshot(self.root / "before")
        return folder

    def redis(self) -> int:
        """The port of a Redis with rows as `docs/migrate-redis.md` finds them."""
        if REDIS_SERVER is None:
            pytest.skip("needs redis-server (Debian: apt-get install redis-server)")
        ports = free_ports(2)
        (self.root / "redis").mkdir()
        server = Server(0, *ports, self.root / "redis", in_cluster=False)
        server.start()
        self.stack.callback(server.kill)
        for key in ITEMS[:3000].tolist():
            server.call("SET", f"item:{key}", np.full(32, key, np.float32).tobytes())
        return server.port

    @property
    def hps(self) -> Path:
        """What HugeCTR has left: `ps.json`, and the files that it names."""
        where = self.root / "of-hugectr"
        if not where.exists():
            hps(where)
        return where

    # --- programs

    def program(self, line: int, text: str, given: dict[str, Any]) -> None:
        for folder in re.findall(r'tierstore\.open\("([^"]+)"', text):
            shutil.rmtree(folder, ignore_errors=True)
        for where in re.findall(r'load_snapshot\("([^"]+)"', text):
            self.snapshot(Path(where))
        for where in re.findall(r'apply_delta\("([^"]+)"', text):
            self.delta(Path(where))
        for where in re.findall(r'SnapshotWriter\("([^"]+)"', text):
            shutil.rmtree(where, ignore_errors=True)
            self.written.add(where)
        for where in re.findall(r'DeltaWriter\("([^"]+)"', text):
            Path(where).parent.mkdir(parents=True, exist_ok=True)
        tree = ast.parse(text)
        if "redis.Redis(" in text:
            text = text.replace("port=6379", f"port={self.redis()}")
        used = {one.id: one.ctx for one in ast.walk(tree) if isinstance(one, ast.Name)}
        with ExitStack() as stack:
            if {"store", "ctr"} & {name for name, how in used.items() if isinstance(how, ast.Load)}:
                store = stack.enter_context(tierstore.open(self.local(Path("of-programs")), **SMALL))
                given |= {"store": store, "ctr": store.model("ctr")}
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            code = compile("\n" * line + self.here(text), str(ROOT / self.page), "exec", flags=flags)
            if inspect.iscoroutine(running := eval(code, given)):
                asyncio.run(running)


@contextmanager
def _buckets() -> Iterator[None]:
    """Object storage, as the environment has it."""
    with ObjectServer() as server:
        for name in ("built", "backups"):
            server.client.create_bucket(Bucket=name)
        os.environ.update(server.environment)
        yield


def _section(page: str, line: int) -> str:
    """The heading above a line."""
    above = (ROOT / page).read_text(encoding="utf-8").splitlines()[:line]
    return next((text for text in reversed(above) if text.startswith("## ")), "")


def _value(rest: list[str], *options: str) -> list[str]:
    return [rest[i + 1] for i, word in enumerate(rest) if word in options]


FLAGS = ("--no-activate", "--json", "--all", "--remove", "--scores", "--built", "--force", "--zeros-delete", "--")
WITH_STATE = (
    "activate", "backup", "canary", "delta", "drop", "explain", "export", "hot", "label", "load", "lookup", "promote", "rollback",
    "status", "triton-model", "verify", "withdraw", "audit",
)  # fmt: skip


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    kept = dict(os.environ)
    for name in list(os.environ):
        if name.upper().startswith(ENV_PREFIX):
            monkeypatch.delenv(name)
    for name, value in SMALL.items():
        monkeypatch.setenv(ENV_PREFIX + name.upper(), str(value))
    monkeypatch.chdir(tmp_path)
    page = request.node.callspec.params["page"]
    data(DENSE.get(page, ALL_INPUTS))
    _checkpoints()
    for name in ("deltas", "run/tierstore", "srv", "mnt", "var/lib", "nvme"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "srv/snapshots").symlink_to("../snapshots")
    with ExitStack() as stack:
        made = Scene(tmp_path, page, stack)
        yield made
        made.stop()
    os.environ.clear()  # of what the page has exported
    os.environ.update(kept)


def _checkpoints() -> None:
    """What trainers have left, in the working directory; and the prices that a page shows."""
    scale = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    Path("prices.toml").write_text(scale.split("```toml\ncurrency", 1)[1].split("```")[0].join(("currency", "")))
    rows = np.arange(40, dtype="<f4").reshape(10, 4)
    Path("checkpoints").mkdir()
    for table in ("item", "user"):
        np.arange(10, dtype="<i8").tofile(f"checkpoints/{table}_mht_1of1-keys")
        rows.tofile(f"checkpoints/{table}_mht_1of1-values")
    safetensors(Path("model.safetensors"), {"ebc.embedding_bags.item.weight": rows})
    times = pd.date_range("2026-11-01", periods=4, freq="D", tz="UTC")
    frame = pd.DataFrame({"item_id": [17, 42, 7, 17], "embedding": list(rows[:4]), "event_timestamp": times})
    Path("features").mkdir()
    frame.to_parquet("features/item_embeddings.parquet")


@pytest.mark.thorough
@pytest.mark.parametrize("page", [page for page in PAGES if any(why_not(text) is None for *_, text in items(page))])
def test_what_a_page_tells_to_do_works(page: str, scene: Scene) -> None:
    given: dict[str, Any] = {}
    readers = names() | {
        "offsets": np.arange(3),
        "weights": np.ones(3, np.float32),
        "candidate_keys": [17, 42],
        "dim": 32,
        "item_keys": ITEMS,
        "item_vectors": vectors(ITEMS),
        "user_keys": ITEMS,
        "user_vectors": vectors(ITEMS),
        "seq": 1,
        "frame": pd.DataFrame(
            {"item_id": [17], "embedding": [np.ones(4)], "event_timestamp": [pd.Timestamp("2026-11-05", tz="UTC")]}
        ),
    }
    scene.as_left = page == "docs/tutorial.md"
    if any("s3://" in text and why_not(text) is None for *_, text in items(page)):
        scene.stack.enter_context(_buckets())
    block, section, before = 0, "", dict(os.environ)
    for line, kind, text in items(page):
        if why_not(text) is not None:
            continue
        if line != block:  # what a block exports is its own
            if not scene.as_left and section != (section := _section(page, line)):
                scene.stop()
            block = line
            os.environ.clear()
            os.environ.update(before)
        try:
            if not scene.as_left:
                given |= readers
            if kind == "sh":
                scene.shell(text)
            elif scene.as_left:
                alone(scene.here(text))
            else:
                scene.program(line, text, given)
        except BaseException as error:
            error.add_note(f"{page}:{line}: {text}")
            raise
