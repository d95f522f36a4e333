"""`Client`: the verbs of a store, over HTTP.

Any thread may use one `Client`, and many should share one: it keeps its connections open. It holds no
state of the service's, so nothing is lost with it; a verb that was acknowledged is as durable as the
service made it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from tierstore.client import wire
from tierstore.client.batches import Batch, split
from tierstore.client.transport import Transport
from tierstore.errors import Closed, InvalidInput, NotReady, SnapshotError, TierstoreError
from tierstore.types import DeltaResult, Progress, ProgressFn, Vectors

SPLIT_KEYS = 1 << 16  # keys of one request; larger look-ups go out as several, side by side
PARALLEL = 4  # requests of one large look-up under way at once
SWITCH_TIMEOUT_S = 600.0  # a version is caught up and warmed before it serves, however long that takes
POLL_S = (0.05, 1.0)  # how often a job is asked after: at first, and at most
_ANSWERS = {"float32": {}, "float16": {"dtype": "FP16"}}


class Client:
    """A running service.

    Args:
        url: where it listens, such as `http://127.0.0.1:8000`.
        token: sent as a bearer token, if the service asks for one.
        timeout_s: the longest a request may go without a byte from the service.

    Every method raises Unreachable when nothing answers, Forbidden when the service does not let this
    caller, and otherwise the errors that the embedded store raises.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 30.0) -> None:
        self._transport = Transport(url, token, timeout_s)
        self._lock = threading.Lock()
        self._helpers: ThreadPoolExecutor | None = None  # guarded by _lock; made by the first large look-up
        self._closed = False  # guarded by _lock

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. May be called twice."""
        with self._lock:
            self._closed = True
            helpers, self._helpers = self._helpers, None
        if helpers is not None:
            helpers.shutdown()
        self._transport.close()

    # --- look-ups

    def model(self, name: str) -> RemoteModel:
        """The model of that name. Nothing is sent: a name that the service does not know fails at the first look-up."""
        return RemoteModel(self, name)

    def lookup(self, model: str, feature: str, keys: Any, *, dtype: str = "float32", return_found: bool = False) -> Any:
        """See `RemoteModel.lookup`."""
        return self.model(model).lookup(feature, keys, dtype=dtype, return_found=return_found)

    def lookup_bags(self, model: str, feature: str, keys: Any, offsets: Any, **options: Any) -> Any:
        """See `RemoteModel.lookup_bags`."""
        return self.model(model).lookup_bags(feature, keys, offsets, **options)

    def lookup_many(self, model: str, keys: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """See `RemoteModel.lookup_many`."""
        return self.model(model).lookup_many(keys, **options)

    # --- state

    def ready(self) -> bool:
        """Whether the service takes requests."""
        return self._transport.succeeds("/v2/health/ready")

    def models(self) -> list[str]:
        """Names of the models that the service knows."""
        return sorted(self.status()["models"])

    def status(self, model: str | None = None) -> dict[str, Any]:
        """`{"models": {name: …}, …}`, the document of the embedded store's `status`. NotFound for an unknown `model`.

        Without `model` the store's own bounds stand beside the models, and under `service` those of the service.
        """
        if model is not None:
            return {"models": {model: self._admin("GET", model)}}
        listed = self._transport.json("GET", "/admin/models")
        return {**listed, "models": {document["model"]: document for document in listed["models"]}}

    # --- versions and deltas

    def load_snapshot(
        self,
        source: str | Path,
        *,
        model: str | None = None,
        activate: bool = True,
        progress: ProgressFn | None = None,
    ) -> int:
        """Have the service load a snapshot and wait until that is done.

        Args:
            source: as the service sees it: under one of its source roots.
            model: whose snapshot it is; read from `source/snapshot.json` if that can be read here.
            activate: serve it once it is loaded, caught up and warm.
            progress: called now and then on this thread.

        Returns the version. Raises SnapshotError when it is refused; nothing that served before changes then.
        """
        model = model or snapshot_model(source)
        job = self.start_load(source, model=model, activate=activate)
        pause_s, longest_s = POLL_S
        told: Progress | None = None
        while True:
            document = self.job(job)
            at = Progress(document.get("phase") or "", document.get("done") or 0, document.get("total") or 0)
            if progress is not None and at != told:
                told = at
                progress(at)
            if document["state"] == "done":
                return int(document["version"])
            if document["state"] == "failed":
                raise SnapshotError(str(document.get("error") or "the load failed"))
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, longest_s)

    def start_load(self, source: str | Path, *, model: str, activate: bool = True) -> str:
        """Begin what `load_snapshot` does and return the job's id for `job`."""
        started = self._admin("POST", model, "/snapshots", {"source": str(source), "activate": activate})
        return str(started["job"])

    def job(self, job: str) -> dict[str, Any]:
        """A load's `state` (`running`, `done`, `failed`), `phase`, `done`, `total`, `rate`, `eta_s`, `error`."""
        return dict(self._transport.json("GET", f"/admin/jobs/{quote(job, safe='')}"))

    def apply_delta(
        self, source: bytes | bytearray | memoryview | str | Path, *, model: str | None = None
    ) -> DeltaResult:
        """Send a delta: the Arrow stream itself, or the path of a file that holds it.

        On return it is durable and every look-up that starts sees it whole. SequenceGap names the next seq.
        `model` defaults to the one in the stream's metadata.
        """
        data = Path(source).read_bytes() if isinstance(source, (str, Path)) else bytes(source)
        model = model or delta_model(data)
        answer = self._admin(
            "POST", model, "/deltas", content=data, headers={"Content-Type": "application/vnd.apache.arrow.stream"}
        )
        return DeltaResult(model, int(answer["seq"]), bool(answer["applied"]))

    def activate(self, model: str, version: int, *, force: bool = False) -> None:
        """Serve a kept version. Conflict for a stale one, unless `force`."""
        self._admin("POST", model, "/activate", {"version": version, **_forced(force)}, timeout=SWITCH_TIMEOUT_S)

    def rollback(self, model: str, *, force: bool = False) -> int:
        """Serve the version before the active one, and return it. Conflict if there is none, or it is stale and not `force`."""
        answer = self._admin("POST", model, "/rollback", _forced(force), timeout=SWITCH_TIMEOUT_S)
        return int(answer["active_version"])

    def drop(self, model: str, version: int) -> None:
        """Remove a version from disk. Conflict for the active one."""
        self._admin("DELETE", model, f"/versions/{version}")

    def canary(self, model: str, version: int, share: float = 0.05, *, force: bool = False) -> None:
        """Serve a kept version to `share` (0 to 1) of the requests that name none; for the canary, change its share alone."""
        body = {"version": version, "share": share, **_forced(force)}
        self._admin("POST", model, "/canary", body, timeout=SWITCH_TIMEOUT_S)

    def promote(self, model: str) -> int:
        """Make the canary the active version, and return it. Conflict where there is none."""
        return int(self._admin("POST", model, "/promote", timeout=SWITCH_TIMEOUT_S)["active_version"])

    def withdraw(self, model: str) -> int:
        """Stop serving the canary, and return its version, which is kept. Conflict where there is none."""
        return int(self._admin("POST", model, "/withdraw")["withdrawn"])

    def label(self, model: str, name: str, version: int) -> None:
        """Let a label stand for a version that is served, until that is served no more."""
        self._admin("PUT", model, f"/labels/{quote(name, safe='')}", {"version": version})

    def unlabel(self, model: str, name: str) -> None:
        """Remove a label."""
        self._admin("DELETE", model, f"/labels/{quote(name, safe='')}")

    def _admin(self, method: str, model: str, path: str = "", body: Any = None, **more: Any) -> Any:
        return self._transport.json(method, f"/admin/models/{quote(model, safe='')}{path}", body, **more)

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._closed:
                raise Closed("the client was closed")
            if self._helpers is None:
                self._helpers = ThreadPoolExecutor(PARALLEL, thread_name_prefix="tierstore-client")
            return self._helpers


class RemoteModel:
    """A model of a service. Holds nothing but its name, so it stays good across version switches."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self.name = client, name
        self._path = f"/v2/models/{quote(name, safe='')}"

    @property
    def ready(self) -> bool:
        """Whether a version of the model is served."""
        return self._client._transport.succeeds(f"{self._path}/ready")

    def metadata(self) -> dict[str, Any]:
        """The protocol's model metadata: `inputs` and `outputs` with their datatypes and shapes."""
        return dict(self._client._transport.json("GET", self._path))

    @overload
    def lookup(self, feature: str, keys: Any, *, dtype: str = ..., return_found: Literal[False] = ...) -> Vectors: ...
    @overload
    def lookup(
        self, feature: str, keys: Any, *, dtype: str = ..., return_found: Literal[True]
    ) -> tuple[Vectors, npt.NDArray[np.bool_]]: ...
    @overload
    def lookup(self, feature: str, keys: Any, *, dtype: str = ..., return_found: bool) -> Any: ...
    def lookup(self, feature: str, keys: Any, *, dtype: str = "float32", return_found: bool = False) -> Any:
        """Rows of `keys`, in their order.

        Args:
            feature: a feature of the model.
            keys: n keys: an integer array or list, strings for a string table, or an Arrow array.
            dtype: of the answer, `float32` or `float16`.
            return_found: also tell which keys the table holds.

        Returns vectors [n, dim], or (vectors [n, dim], found bool[n]).

        A look-up of more than 65,536 keys goes out as several requests side by side. They are all
        answered by one version, but a delta may become visible between them.
        """
        return self._ask(feature, Batch.of(feature, keys), dtype, return_found)

    def lookup_bags(
        self,
        feature: str,
        keys: Any,
        offsets: Any,
        *,
        weights: Any = None,
        combiner: str | None = None,
        dtype: str = "float32",
        return_found: bool = False,
    ) -> Any:
        """Embedding bags, pooled.

        Args:
            keys: n keys, as in `lookup`.
            offsets: int64[bags], the start of each bag in `keys`: the first 0, never descending, no end entry.
            weights: float32[n], 1 each if not given.
            combiner: `sum`, `mean` or `sqrtn`; None for the feature's own.

        Returns vectors [bags, dim], zeros for an empty bag; with `return_found` also found bool[n].
        """
        return self._ask(feature, Batch.of(feature, keys, offsets, weights), dtype, return_found, combiner)

    def lookup_many(
        self, keys: Mapping[str, Any], *, dtype: str = "float32", return_found: bool = False
    ) -> dict[str, Any]:
        """Several features at once, in one request and so of one moment: {feature: what `lookup` returns}."""
        inputs = [tensor for feature, of in keys.items() for tensor in Batch.of(feature, of).inputs()]
        answer = self._infer(inputs, _outputs(list(keys), dtype, return_found))
        return {feature: _result(answer, feature, return_found) for feature in keys}

    def _ask(self, feature: str, batch: Batch, dtype: str, return_found: bool, combiner: str | None = None) -> Any:
        outputs = _outputs([feature], dtype, return_found, combiner)
        parts = split(batch, SPLIT_KEYS)
        if len(parts) == 1:
            return _result(self._infer(batch.inputs(), outputs), feature, return_found)
        for _ in range(3):  # a switch of versions while the parts are under way sends them all again
            answers = list(self._client._pool().map(lambda part: self._infer(part.inputs(), outputs), parts))
            if len({answer.version for answer in answers}) == 1:
                joined = {
                    name: np.concatenate([answer.outputs[name] for answer in answers]) for name in answers[0].outputs
                }
                return _result(wire.Answer(answers[0].version, joined), feature, return_found)
        raise NotReady(
            f"model {self.name!r} changed its version again and again while a look-up of {batch.n} keys went on; try again"
        )

    def _infer(self, inputs: list[wire.Input], outputs: list[wire.Output]) -> wire.Answer:
        headers, body = wire.request(inputs, outputs)
        try:
            return self._client._transport.infer(f"{self._path}/infer", headers, body)
        except InvalidInput as error:
            # The protocol answers 400 for a model that does not serve as for a bad request; its own page tells them apart.
            if not self.ready:
                raise NotReady(str(error)) from error
            raise


def snapshot_model(source: str | Path) -> str:
    """The model that a snapshot which can be read here is of. InvalidInput where it cannot."""
    path = Path(str(source).removeprefix("file://")) / "snapshot.json"
    try:
        return str(json.loads(path.read_bytes())["model"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"cannot tell from {path} which model the snapshot is of; name it (model=, --model): {error}"
        ) from error


def delta_model(data: bytes) -> str:
    """The model that a delta names in its Arrow schema. InvalidInput for anything that is not a delta."""
    import pyarrow as pa

    try:
        return str(pa.ipc.open_stream(data).schema.metadata[b"model"].decode())
    except (pa.ArrowException, OSError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"expected a delta: an Arrow IPC stream whose schema metadata has `model`: {error}"
        ) from error


def _forced(force: bool) -> dict[str, bool]:
    return {"force": True} if force else {}


def _outputs(features: list[str], dtype: str, return_found: bool, combiner: str | None = None) -> list[wire.Output]:
    parameters = _ANSWERS.get(dtype)
    if parameters is None:
        raise InvalidInput(f"dtype {dtype!r} is not known: answers are 'float32' or 'float16'")
    if combiner is not None:
        parameters = {**parameters, "combiner": combiner}
    # BOOL last: what follows it in the answer would lie askew.
    vectors = [wire.Output(feature, dict(parameters)) for feature in features]
    return vectors + [wire.Output(f"{feature}.found", {}) for feature in features if return_found]


def _result(answer: wire.Answer, feature: str, return_found: bool) -> Any:
    try:
        rows = answer.outputs[feature]
        return (rows, answer.outputs[f"{feature}.found"]) if return_found else rows
    except KeyError as error:
        raise TierstoreError(f"the service's answer lacks the output {error}") from error
