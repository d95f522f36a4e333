"""The verbs, as operations: what each sends to the service, and what it makes of the answers.

`Client` and `AsyncClient` give these to a transport. Any thread may use an `Operations`; an operation belongs to the
verb that runs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast
from urllib.parse import quote

from tierstore.arguments import as_version, by_name, check_name, check_share, names_of, number_or_none, whole_number
from tierstore.client import wire
from tierstore.client.attempts import new_request_id
from tierstore.client.identify import delta_model, path_text, snapshot_model
from tierstore.client.inference import (
    Deadline,
    InferenceRequest,
    ModelCache,
    Operation,
    Outputs,
    Pause,
    Version,
    exchange,
    inference,
    known_name,
    metadata,
    model_path,
    output_named,
    succeeds,
    text,
    wanted_outputs,
)
from tierstore.client.inputs import Batch, as_keys, check_options, predict_inputs
from tierstore.client.replies import part_of
from tierstore.client.settings import ClientSettings
from tierstore.client.splitting import split_lookup, split_predict
from tierstore.client.upload import PIECE_TIMEOUT_S, SCHEME, SentSnapshot, files_to_send
from tierstore.errors import (
    Closed,
    Conflict,
    Corruption,
    DeltaError,
    DiskFull,
    Fenced,
    InvalidInput,
    LoadCancelled,
    MissingExtra,
    NotFound,
    NotReady,
    Overloaded,
    RemoteUnavailable,
    SnapshotError,
    StorageError,
    TierstoreError,
    TooLarge,
    shown,
)
from tierstore.formats.delta.source import DeltaSource, delta_bytes
from tierstore.types import MAX_PARTITIONS, BackupReport, DeltaResult, ExportReport, Progress, ProgressFn, head_name

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tierstore.status import ServiceStatus

    Floats = npt.NDArray[np.floating[Any]]
    Found = npt.NDArray[np.bool_]
else:
    Floats = Found = Any

Source = str | Path

POLL_S = (0.05, 1.0)  # how often the state of a job is read: at first, and at most
SWITCH_TIMEOUT_S = 600.0  # a version is caught up and warmed before it serves, however long that takes
_OF_JOBS: dict[str | None, Callable[[str], TierstoreError]] = {
    kind.__name__: kind
    for kind in (
        Closed, Conflict, Corruption, DiskFull, Fenced, InvalidInput, LoadCancelled, MissingExtra, NotFound, NotReady,
        Overloaded, RemoteUnavailable, SnapshotError, StorageError, TooLarge,
    )
}  # fmt: skip
_ANSWERS: dict[str, dict[str, str]] = {"float32": {}, "float16": {"dtype": "FP16"}}


class LookupOptions(TypedDict, total=False):
    """Options of every look-up.

    dtype: of the answer. version: a number or a label; by default the service chooses. timeout_s: of the whole call.
    request_id: by default random. It is in the service's log lines and on the errors that are raised here; a service
    that splits traffic over versions gives equal ids the same version.
    """

    dtype: Literal["float32", "float16"]
    version: Version
    timeout_s: float | None
    request_id: str | None


class BagOptions(LookupOptions, total=False):
    """Options of `lookup_bags`: those of a look-up, and these.

    weights: float32[n], 1 each by default. combiner: `sum`, `mean` or `sqrtn`; by default the feature's own.
    """

    weights: npt.ArrayLike | None
    combiner: str | None


class PredictOptions(TypedDict, total=False):
    """Options of `predict`: those of a look-up, and these.

    head: the dense part that answers, by default the one without a name. split_items: in place of the client's; None
    sends one request.
    """

    head: str
    version: Version
    timeout_s: float | None
    request_id: str | None
    split_items: int | Literal["client"] | None


class Operations:
    """The verbs of one client."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._cache = ModelCache()

    # --- look-ups and predictions

    def lookup(self, model: str, feature: str, keys: Any, return_found: bool, options: LookupOptions) -> Operation[Any]:
        check_options(options, LookupOptions)
        answers = yield from self._lookup(model, [Batch.of(feature, keys)], return_found, None, options)
        return answers[feature]

    def lookup_bags(
        self, model: str, feature: str, keys: Any, offsets: Any, return_found: bool, options: BagOptions
    ) -> Operation[Any]:
        check_options(options, BagOptions)
        if offsets is None:
            raise InvalidInput("offsets: expected the start of each bag in the keys, got None")
        batch = Batch.of(feature, keys, offsets, options.get("weights"))
        answers = yield from self._lookup(model, [batch], return_found, options.get("combiner"), options)
        return answers[feature]

    def lookup_many(
        self, model: str, keys: Mapping[str, Any], return_found: bool, options: LookupOptions
    ) -> Operation[dict[str, Any]]:
        check_options(options, LookupOptions)
        batches = [Batch.from_value(feature, value) for feature, value in by_name(keys, "keys")]
        return (yield from self._lookup(model, batches, return_found, None, options))

    def predict(
        self, model: str, inputs: Mapping[str, Any], outputs: Sequence[str] | None, options: PredictOptions
    ) -> Operation[Any]:
        check_options(options, PredictOptions)
        outputs = names_of("outputs", outputs)
        request = self._request(head_name(model, options.get("head", "")), options)
        limit = options.get("split_items", "client")
        limit = self._settings.split_items if limit == "client" else number_or_none("split_items", limit, 1)
        arrays = yield from self._predict(request, inputs, outputs, limit)
        if outputs is None and len(arrays) == 1:
            return next(iter(arrays.values()))
        return arrays

    # --- state

    def ready(self, model: str | None = None) -> Operation[bool]:
        path = "/v2/health/ready" if model is None else f"{model_path(model)}/ready"
        return (yield from succeeds(path, self._deadline()))

    def metadata(self, model: str, version: Version) -> Operation[dict[str, Any]]:
        return (yield from metadata(self._cache, model, version, self._deadline(), renew=True))

    def served_version(self, model: str, version: Version) -> Operation[int]:
        """The number of the version that is served under a label, by default the active one.
        NotFound for an unknown one."""
        document = yield from metadata(self._cache, model, version, self._deadline(), renew=True)
        numbers = part_of(document, "versions", list)
        if len(numbers) != 1 or not str(numbers[0]).isdecimal():
            raise TierstoreError(f"expected the number of the version from the service, got {shown(numbers)}")
        return int(numbers[0])

    def models(self) -> Operation[list[str]]:
        document = yield from self.status(None)
        return sorted(document["models"])

    def metrics(self) -> Operation[str]:
        return text("/metrics", self._deadline())

    def status(self, model: str | None) -> Operation[ServiceStatus]:
        got = yield from self._document("GET", "/admin/models" if model is None else _admin(model))
        listed = got if model is None else {"models": [got]}
        models = {part_of(document, "model", str): document for document in part_of(listed, "models", list)}
        return cast("ServiceStatus", {**listed, "models": models})

    # --- versions and deltas

    def load_snapshot(
        self, source: Source, model: str | None, activate: bool, progress: ProgressFn | None
    ) -> Operation[int]:
        self._one_node("a load")
        model = snapshot_model(source) if model is None else model
        job = yield from self.start_load(source, model, activate, progress)
        document = yield from self._job_done(job, progress, SnapshotError)
        return part_of(document, "version", int)

    def _send(
        self, sent: SentSnapshot, model: str, progress: ProgressFn | None, refused: InvalidInput
    ) -> Operation[None]:
        """Send what the service lacks of a snapshot, piece by piece.

        refused: why it cannot read the directory itself.
        """
        path = f"{_admin(model)}/uploads/{sent.id}"
        body = {"files": [{"name": file.name, "bytes": file.size} for file in sent.files]}
        try:
            state = yield from self._document("PUT", path, body, repeat=True)
        except NotFound as error:  # a service of an earlier release
            raise _narrowed(refused, SnapshotError) from error
        length, there = part_of(state, "piece_bytes", int), part_of(state, "files", list)
        done, total = sum(there), sum(file.size for file in sent.files)
        for number, file in enumerate(sent.files):
            offset = there[number]
            while offset < file.size:
                if progress is not None:
                    progress(Progress("send", done, total))
                piece = file.piece(offset, length)
                query = f"offset={offset}&sha256={hashlib.sha256(piece).hexdigest()}"
                deadline = self._deadline(max(PIECE_TIMEOUT_S, self._settings.timeout_s))
                reply = yield from exchange(
                    "PUT", f"{path}/files/{number}?{query}", deadline, content=piece,
                    content_type="application/octet-stream", repeat=True,
                )  # fmt: skip
                now = part_of(reply.object(), "bytes", int)
                if now <= offset:
                    raise TierstoreError(
                        f"expected more than {offset} bytes of {file.name} at the service, it has {now}"
                    )
                done, offset = done + now - offset, now

    def export(
        self, model: str, directory: str | Path, version: Version, new_version: int | None, partitions: int | None,
        progress: ProgressFn | None,
    ) -> Operation[ExportReport]:  # fmt: skip
        body: dict[str, Any] = {"directory": path_text(directory), "version": as_version(version)}
        body["as_version"] = number_or_none("as_version", new_version, 1)
        if partitions is not None:  # which a service of an earlier release does not know
            body["partitions"] = whole_number("partitions", partitions, 1, MAX_PARTITIONS)
        document = yield from self._written(model, "export", body, progress)
        version, seq, done = (part_of(document, name, int) for name in ("version", "seq", "done"))
        return ExportReport(model, version, seq, done)

    def backup(
        self, model: str, directory: str | Path, keep: int, progress: ProgressFn | None
    ) -> Operation[BackupReport]:
        body = {"directory": path_text(directory), "keep": whole_number("keep", keep, 1)}
        document = yield from self._written(model, "backup", body, progress)
        report = part_of(document, "report", dict)
        version = None if report.get("version", 0) is None else part_of(report, "version", int)
        counts = {name: part_of(report, name, int) for name in ("seq", "files", "bytes", "new_bytes")}
        return BackupReport(part_of(report, "model", str), version, **counts)

    def _written(
        self, model: str, kind: str, body: Mapping[str, Any], progress: ProgressFn | None
    ) -> Operation[dict[str, Any]]:
        """Start a job that writes something, and return its document once it is done."""
        self._one_node("an export" if kind == "export" else "a backup")
        started = yield from self._document("POST", f"{_admin(model)}/{kind}s", body)
        return (yield from self._job_done(part_of(started, "job", str), progress, TierstoreError))

    def _job_done(
        self, job: str, progress: ProgressFn | None, otherwise: type[TierstoreError]
    ) -> Operation[dict[str, Any]]:
        """The document of a job once it is done. Raises its error, `otherwise` where its class is not known."""
        document = yield from self._job_ended(job, progress)
        if document["state"] == "failed":
            raise _OF_JOBS.get(document.get("error_type"), otherwise)(str(document.get("error") or "the job failed"))
        return document

    def _job_ended(self, job: str, progress: ProgressFn | None) -> Operation[dict[str, Any]]:
        """The document of a job once it has ended."""
        pause_s, longest_s = POLL_S
        reported: Progress | None = None
        while True:
            document = yield from self.job(job)
            done, total = document.get("done") or 0, document.get("total") or 0
            current = Progress(document.get("phase") or "", done, total, document.get("waits_for"))
            if progress is not None and current != reported:
                reported = current
                progress(current)
            if part_of(document, "state", str) != "running":
                return document
            yield Pause(pause_s)
            pause_s = min(pause_s * 1.5, longest_s)

    def start_load(
        self, source: Source, model: str, activate: bool, progress: ProgressFn | None = None
    ) -> Operation[str]:
        """Start a load, and return its job. What the service cannot read, and is here, is sent first."""
        self._one_node("a load")
        try:
            return (yield from self._start_load(path_text(source), model, activate))
        except InvalidInput as error:
            sent = files_to_send(source, model)
            if sent is None:
                raise _narrowed(error, SnapshotError) from error
            yield from self._send(sent, model, progress, error)
        return (yield from self._start_load(f"{SCHEME}{sent.id}", model, activate))

    def _start_load(self, source: str, model: str, activate: bool) -> Operation[str]:
        body = {"source": source, "activate": activate}
        started = yield from self._document("POST", f"{_admin(model)}/snapshots", body)
        return part_of(started, "job", str)

    def job(self, job: str) -> Operation[dict[str, Any]]:
        self._one_node("a job")
        return (yield from self._document("GET", f"/admin/jobs/{_part('job', job)}"))

    def jobs(self) -> Operation[list[dict[str, Any]]]:
        self._one_node("a job")
        return part_of((yield from self._document("GET", "/admin/jobs")), "jobs", list)

    def apply_delta(self, source: DeltaSource, model: str | None, timeout_s: float | None) -> Operation[DeltaResult]:
        self._one_node("a delta")
        data = bytes(delta_bytes(source))
        model = delta_model(data) if model is None else model
        content_type = "application/vnd.apache.arrow.stream"
        try:
            path = f"/admin/models/{check_name('model', model)}/deltas"
            reply = yield from exchange(
                "POST", path, self._deadline(timeout_s), content=data, content_type=content_type, repeat=True
            )
        except InvalidInput as error:  # nothing but the delta can be that
            raise _narrowed(error, DeltaError) from error
        document = reply.object()
        seq, applied = part_of(document, "seq", int), part_of(document, "applied", bool)
        return DeltaResult(model, seq, applied, document.get("send_as"))

    def cancel(self, job: str) -> Operation[None]:
        self._one_node("a job")
        yield from self._json("DELETE", f"/admin/jobs/{_part('job', job)}")

    def acknowledge(self, job: str) -> Operation[None]:
        self._one_node("a job")
        yield from self._json("POST", f"/admin/jobs/{_part('job', job)}/acknowledge")

    def activate(self, model: str, version: int, force: bool, expected_active: int | None) -> Operation[None]:
        body = {"version": whole_number("version", version, 1), **_options(force, expected_active)}
        yield from self._switch(model, "activate", body)

    def deactivate(self, model: str) -> Operation[None]:
        self._one_node("a switch")
        yield from exchange("POST", f"/v2/repository/models/{known_name('model', model)}/unload", self._deadline())

    def sample(
        self, model: str, version: Version, keys: Mapping[str, Sequence[int]] | None, rows: int, at_s: int | None
    ) -> Operation[dict[str, Any]]:
        body: dict[str, Any] = {"version": as_version(version), "keys": keys, "rows": rows}
        body |= {} if at_s is None else {"expired_at_s": at_s}  # an earlier release does not know it
        return (yield from self._document("POST", f"{_admin(model)}/sample", body, repeat=True))

    def digests(self, model: str, wanted: Mapping[str, Any]) -> Operation[dict[str, Any]]:
        self._one_node("a digest")
        body = {**wanted, "version": as_version(wanted["version"])}
        body |= {name: number_or_none(name, wanted[name], 0) for name in ("seq", "expired_at_s")}
        body["buckets"] = whole_number("buckets", wanted["buckets"], 1)
        return (yield from self._document("POST", f"{_admin(model)}/digests", body, repeat=True))

    def explain(self, model: str, feature: str, keys: Any, version: Version) -> Operation[dict[str, Any]]:
        self._one_node("an explanation")
        body = {
            "feature": known_name("feature", feature),
            "keys": as_keys(keys).tolist(),
            "version": as_version(version),
        }
        return (yield from self._document("POST", f"{_admin(model)}/explain", body, repeat=True))

    def cache(self, model: str, table: str, limit: int) -> Operation[dict[str, Any]]:
        limit = whole_number("limit", limit, 1)
        path = f"{_admin(model)}/tables/{known_name('table', table)}/cache?limit={limit}"
        return (yield from self._document("GET", path))

    def rollback(self, model: str, to_seq: int | None, force: bool, expected_active: int | None) -> Operation[int]:
        body = {} if to_seq is None else {"to_seq": whole_number("to_seq", to_seq, 0)}
        document = yield from self._switch(model, "rollback", {**body, **_options(force, expected_active)})
        return part_of(document, "active_version", int)

    def canary(self, model: str, version: int, share: float, force: bool) -> Operation[None]:
        body = {"version": whole_number("version", version, 1), "share": check_share(share)} | _options(force)
        yield from self._switch(model, "canary", body)

    def promote(self, model: str) -> Operation[int]:
        document = yield from self._switch(model, "promote", None)
        return part_of(document, "active_version", int)

    def withdraw(self, model: str) -> Operation[int]:
        document = yield from self._switch(model, "withdraw", None)
        return part_of(document, "withdrawn", int)

    def drop(self, model: str, version: int) -> Operation[None]:
        self._one_node("a drop")
        number = whole_number("version", version, 1)
        yield from exchange("DELETE", f"{_admin(model)}/versions/{number}", self._deadline())

    def label(self, model: str, name: str, version: int | None) -> Operation[None]:
        """Set a label, or remove it where `version` is None."""
        self._one_node("a label")
        if version is None:
            yield from self._json("DELETE", f"{_admin(model)}/labels/{known_name('label', name)}")
        else:
            body = {"version": whole_number("version", version, 1)}
            yield from self._json("PUT", f"{_admin(model)}/labels/{check_name('label', name)}", body)

    def parked(self, all_states: bool) -> Operation[list[dict[str, Any]]]:
        document = yield from self._document("GET", f"/admin/parked?all_states={str(all_states).lower()}")
        return part_of(document, "parked", list)

    def parked_message(self, name: str) -> Operation[dict[str, Any]]:
        return (yield from self._document("GET", _parked(name)))

    def parked_payload(self, name: str) -> Operation[bytes]:
        reply = yield from exchange("GET", f"{_parked(name)}/payload", self._deadline())
        return bytes(reply.body)

    def decide_parked(self, name: str, verb: str) -> Operation[dict[str, Any]]:
        """`retry` or `skip`."""
        return (yield from self._document("POST", f"{_parked(name)}/{verb}"))

    def log_level(self, level: str) -> Operation[Any]:
        self._one_node("a log level")
        return part_of((yield from self._document("POST", "/admin/log-level", {"level": level})), "before", str)

    # --- inside

    def _one_node(self, what: str) -> None:
        """InvalidInput for what changes one node, or is known to one alone, where the client has several."""
        if len(self._settings.nodes) > 1:
            urls = ", ".join(node.address.url for node in self._settings.nodes)
            raise InvalidInput(
                f"{what} is of one node, and this client has several ({urls}): use a client of that node alone, "
                "or tierstore.rollout for a snapshot on all of them"
            )

    def _deadline(self, timeout_s: float | None = None) -> Deadline:
        return Deadline(self._settings.timeout_s if timeout_s is None else timeout_s)

    def _document(
        self, method: str, path: str, body: Any = None, *, repeat: bool | None = None
    ) -> Operation[dict[str, Any]]:
        return (yield from exchange(method, path, self._deadline(), body, repeat=repeat)).object()

    def _json(self, method: str, path: str, body: Any = None, *, repeat: bool | None = None) -> Operation[Any]:
        return (yield from exchange(method, path, self._deadline(), body, repeat=repeat)).json()

    def _switch(self, model: str, verb: str, body: Mapping[str, Any] | None) -> Operation[dict[str, Any]]:
        self._one_node("a switch")
        deadline = Deadline(max(SWITCH_TIMEOUT_S, self._settings.timeout_s))
        return (yield from exchange("POST", f"{_admin(model)}/{verb}", deadline, body)).object()

    def _request(self, model: str, options: LookupOptions | PredictOptions) -> InferenceRequest:
        request_id = options.get("request_id")
        if request_id is None:
            request_id = new_request_id()
        elif not isinstance(request_id, str) or not (request_id and request_id.isascii() and request_id.isprintable()):
            raise InvalidInput(f"request_id: expected printable ASCII, got {shown(request_id)}")
        deadline = self._deadline(options.get("timeout_s"))
        return InferenceRequest(
            model, as_version(options.get("version")), deadline, request_id, self._settings.hedge_after_s
        )

    def _lookup(
        self, model: str, batches: list[Batch], return_found: bool, combiner: str | None, options: LookupOptions
    ) -> Operation[dict[str, Any]]:
        dtype, request, cache = options.get("dtype", "float32"), self._request(model, options), self._cache
        for batch in batches:
            known_name("feature", batch.feature)
        outputs = {batch.feature: _outputs(batch.feature, dtype, return_found, combiner) for batch in batches}
        if not batches or not all(batch.n for batch in batches):
            document = yield from metadata(
                cache, model, request.version, request.deadline, request_id=request.request_id
            )
            batches = [batch.as_declared(document) for batch in batches]
        if not batches:
            return {}
        whole = partial(split_lookup, batches, outputs, None)
        split = split_lookup(batches, outputs, self._settings.split_keys)
        try:
            arrays = yield from inference(request, split, whole, cache)
        except InvalidInput:  # as the protocol demands also where a feature is unknown
            yield from self._check_features(request, outputs)
            raise
        answers: dict[str, Any] = {}
        for batch in batches:
            rows = output_named(arrays, batch.feature)
            answers[batch.feature] = (rows, output_named(arrays, f"{batch.feature}.found")) if return_found else rows
        return answers

    def _check_features(self, request: InferenceRequest, features: Iterable[str]) -> Operation[None]:
        """NotFound for one of `features` that the version does not have, as far as the service says."""
        cache, model, version = self._cache, request.model, request.version
        try:
            document = yield from metadata(
                cache, model, version, request.deadline, renew=True, request_id=request.request_id
            )
        except TierstoreError:  # what was refused first is the error
            return
        declared = {entry["name"] for entry in document.get("outputs", [])}
        there = sorted(name for name in declared if f"{name}.found" in declared)
        unknown = [feature for feature in features if feature not in there]
        if there and unknown:
            number = ", ".join(document.get("versions", []))
            error = NotFound(f"no feature {unknown[0]!r}; version {number} has {', '.join(there)}")
            raise error.with_request_id(request.request_id)

    def _predict(
        self, request: InferenceRequest, inputs: Mapping[str, Any], outputs: Sequence[str] | None, limit: int | None
    ) -> Operation[Outputs]:
        cache, model, version = self._cache, request.model, request.version
        document = yield from metadata(cache, model, version, request.deadline, request_id=request.request_id)
        while True:
            try:
                wanted = wanted_outputs(outputs, document)
                tensors = predict_inputs(inputs, document)
                split = split_predict(tensors, wanted, None if model in cache.unsplittable else limit)
                arrays = yield from inference(request, split, partial(split_predict, tensors, wanted, None), cache)
                break
            except (InvalidInput, MissingExtra, NotReady):  # the cached metadata may be that of an earlier version
                renewed = yield from metadata(
                    cache, model, version, request.deadline, renew=True, request_id=request.request_id
                )
                if renewed == document:
                    raise
                document = renewed
        for name in outputs or ():
            output_named(arrays, name)
        return arrays


def _outputs(feature: str, dtype: str, return_found: bool, combiner: str | None) -> list[wire.Output]:
    parameters = _ANSWERS.get(dtype) if isinstance(dtype, str) else None
    if parameters is None:
        raise InvalidInput(f"dtype: expected 'float32' or 'float16', got {dtype!r}")
    if combiner is not None:
        parameters = {**parameters, "combiner": combiner}
    rows = [wire.Output(feature, dict(parameters))]
    return [*rows, wire.Output(f"{feature}.found", {})] if return_found else rows


def _narrowed(error: InvalidInput, kind: type[InvalidInput]) -> InvalidInput:
    """The same error as one of a more precise class."""
    return error if isinstance(error, kind) else kind(str(error)).with_request_id(error.request_id)


def _admin(model: str) -> str:
    return f"/admin/models/{known_name('model', model)}"


def _options(force: bool, active: int | None = None) -> dict[str, Any]:
    body: dict[str, Any] = {"force": True} if force else {}
    return body if active is None else body | {"expected_active": whole_number("expected_active", active, 1)}


def _parked(name: str) -> str:
    return f"/admin/parked/{_part('parked message', name)}"


def _part(kind: str, name: object) -> str:
    """The name of something as a part of a path. NotFound for what is no name."""
    if not isinstance(name, str) or not name:
        raise NotFound(f"no {kind} {shown(name)}")
    return quote(name, safe="", errors="replace")
