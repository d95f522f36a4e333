"""Predictions that reactors have begun: threads of the look-up pool run their graphs on the prepared rows.

A reactor looks the rows up, writes the head of the answer, and puts the number of a job into the pool's queue
(`reactor/predictions.py`). It leaves rows that a graph reads on a device to the thread, which passes them in place. A
thread runs the graph, writes the scores behind the head, and gives the job back to its reactor, which
sends the answer: two wake-ups. A job keeps the view of its rows, and so the dense part. Its words name the waiting
client: an HTTP/1.1 connection, or a gRPC stream. Python answers a job that fails: it sends, counts and logs the error.
Python also answers a job whose request must be planned anew.

`serve` runs on the pool's threads; `cut_off` and `error_of` on the event loop, `close` on any thread, once.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore.config import Settings
from tierstore.errors import TierstoreError
from tierstore.lookup import cold_reads as job_words
from tierstore.lookup.scoring import GRAPH_ROW
from tierstore.service.dataplane.inference import DataPlane
from tierstore.service.dataplane.plan import Request
from tierstore.service.dataplane.tensors import TensorSpec
from tierstore.service.forwarded import Proxies
from tierstore.service.limits.shedding import Caller, Gone
from tierstore.service.limits.worker_pool import WorkerPool
from tierstore.service.reactor.cold_reads import ColdReaders, free
from tierstore.service.reactor.reply import Pipes, Reply, split_head
from tierstore.service.reactor.scorings import Scoring
from tierstore.service.request_log import LoggedRequest, RequestLog
from tierstore.service.stats import BatchStats, InferenceStats, RequestTimes, Timings
from tierstore.wire.http1.head import MOST_HEAD_BYTES

logger = logging.getLogger(__name__)

_NUMBER = struct.Struct("<q")
_MEMORY = [ctypes.c_char * (1 << bits) for bits in range(48)]  # blocks by size, rounded up
_DONE, _FOR_PYTHON, _RETURNED = job_words.DONE, job_words.FOR_PYTHON, job_words.RETURNED
_FIELDS = job_words.JOB.dtype.names or ()
_REQUEST_ID = b"x-request-id"
_MOST_ERRORS = 4096  # errors that wait to be fetched; beyond that the oldest are dropped
Words = dict[str, int]


class Counted(Protocol):
    """The part of the service that counts predictions."""

    dataplane: DataPlane
    settings: Settings
    lookup_pool: WorkerPool
    batches: BatchStats
    inference_stats: InferenceStats
    request_times: RequestTimes
    request_log: RequestLog
    proxies: Proxies


class _Job:
    """One prediction, as arrays in its block: `feed` for the graph, `targets` for its scores. One thread at a time."""

    __slots__ = ("feed", "number", "scoring", "targets", "words")

    def __init__(self, number: int, words: Words, scoring: Scoring) -> None:
        self.number, self.words, self.scoring = number, words, scoring
        block, inputs, outputs = words["block"], scoring.inputs, scoring.outputs
        memory: Any = _MEMORY[words["held_bytes"].bit_length()].from_address(block)
        table = np.ndarray(len(inputs) + len(outputs), GRAPH_ROW.dtype, memory, words["table"] - block).tolist()
        self.feed: dict[str, npt.NDArray[Any]] = {
            name: np.ndarray(sizes[:rank], dtype, memory, at - block)
            for (name, dtype, rank), (at, sizes) in zip(inputs, table, strict=False)
        }
        self.targets: list[npt.NDArray[Any]] = [
            np.ndarray(sizes[:rank], dtype, memory, at - block)
            for (_, dtype, rank), (at, sizes) in zip(outputs, table[len(inputs) :], strict=True)
        ]

    @property
    def items(self) -> int:
        """The first size of all its inputs and outputs; 0 if they differ."""
        sizes = {array.shape[0] for array in (*self.feed.values(), *self.targets)}
        return sizes.pop() if len(sizes) == 1 else 0

    @property
    def is_finite(self) -> bool:
        """Whether no score is NaN or infinite."""
        return all(bool(np.isfinite(target).all()) for target in self.targets if target.dtype.kind == "f")

    def joins(self, other: _Job) -> bool:
        """Whether it differs from another one of its structure only in the first sizes."""
        mine, its = (*self.feed.values(), *self.targets), (*other.feed.values(), *other.targets)
        return all(one.shape[1:] == another.shape[1:] for one, another in zip(mine, its, strict=True))


class Predictions:
    """The predictions among the jobs of all reactors of a service; `scorings` are found by their number."""

    def __init__(
        self,
        service: Counted,
        scorings: Mapping[int, Scoring],
        pipes: Pipes,
        readers: ColdReaders,
        views: Mapping[int, Any],
    ) -> None:
        # constant after construction
        self._views = views  # by the address that jobs name
        self._service, self._scorings, self._pipes = service, scorings, pipes
        self._jobs, self._done = readers.jobs, readers.done_at
        self._pool, self._most_items = service.lookup_pool, service.settings.batch_max_items
        self._lock = threading.Lock()
        # guarded by _lock
        self._running: set[int] = set()  # numbers of jobs
        # by connection, serial and stream, until Python answers
        self._errors: dict[tuple[int, int], tuple[int, BaseException]] = {}
        self._cut = False  # whether nothing is answered any more
        self._closed = False  # whether a thread must free its job itself

    # --- on threads of the pool

    def serve(self, number: int) -> None:
        """Run a job, and jobs that may be joined with it."""
        job = self._begin(number)
        if job is None:
            return
        jobs = [job]
        if self._most_items and job.scoring.joins and 0 < job.items < self._most_items:
            jobs += self._others(job)
        began_s = time.perf_counter()
        waits, ready = self._pool.waits, []
        assert waits is not None
        try:
            for one in jobs:
                try:
                    waits.check(one.words["queued_ns"], self._caller(one))
                    ready.append(one)
                except Exception as error:  # noqa: BLE001 - Python tells it
                    self._end(one, error)
            if len(ready) > 1 and self._run_joined(ready):
                return
            if len(ready) > 1:
                self._service.batches.add_apart(len(ready))
            for one in ready:
                self._run(one)
        except Exception as error:
            logger.exception("predictions are left to Python")
            for one in jobs:
                if one.number in self._running:
                    self._end(one, error)
        finally:
            for _ in jobs:
                waits.ran((time.perf_counter() - began_s) / len(jobs))
            self._pool.jobs_done(len(jobs))

    def _begin(self, number: int) -> _Job | None:
        """Take a job from the queue; None if it is over already."""
        words = _words(self._jobs[number])
        with self._lock:
            cut = self._cut
            if not cut:
                self._running.add(number)
        if cut:
            self._pool.jobs_done(1)
            return None
        return _Job(number, words, self._scorings[words["scoring"]])  # kept while the job keeps its view

    def _others(self, first: _Job) -> list[_Job]:
        """Waiting jobs that may be joined with one; others at the head of the queue go to its end."""
        assert self._pool.jobs is not None
        others, back, items = [], [], first.items
        for number in self._pool.jobs.jobs(self._most_items):
            scoring = self._scorings.get(int(self._jobs["scoring"][number]))
            if scoring is not None and scoring.runs_as(first.scoring):
                job = self._begin(number)
                if job is None:
                    continue
                more = job.items
                if 0 < more <= self._most_items - items and job.joins(first):
                    others.append(job)
                    items += more
                    continue
                with self._lock:
                    self._running.discard(number)
            back.append(number)
        self._pool.jobs.give_back(back)
        return others

    def _caller(self, job: _Job) -> Caller:
        caller = Caller(job.words["arrived_ns"], partial(self._is_lost, job.number))
        caller.deadline_ns = job.words["deadline_ns"] or None
        return caller

    def _is_lost(self, number: int) -> bool:
        return bool(self._jobs["lost"][number])

    def _run(self, job: _Job) -> None:
        scoring, began_ns = job.scoring, time.perf_counter_ns()
        session = scoring.session
        if session.loose is not scoring.loose:  # an output differs from its declaration: plan the request anew
            self._end(job, None)
            return
        lookup_ns = 0
        try:
            if scoring.request is not None:
                lookup_ns = self._run_on_keys(job, scoring.request)
            else:
                results = session.run_feed(scoring.names, job.feed)
                for name, target, result in zip(scoring.names, job.targets, results, strict=True):
                    session.check_shape(name, target.shape, result)
                    target[...] = result
        except BaseException as error:  # noqa: BLE001 - Python tells it
            self._end(job, error)
        else:
            self._answer(job, began_ns, time.perf_counter_ns() - began_ns - lookup_ns, lookup_ns)

    def _run_on_keys(self, job: _Job, like: Request) -> int:
        """Look up and run the graph; the job's `feed` are the inputs of its request. Returns the ns of the look-up."""
        specs = [
            TensorSpec(spec.name, spec.datatype, array.shape)
            for spec, array in zip(like.inputs, job.feed.values(), strict=True)
        ]
        request = Request(specs, like.outputs, like.combiner)
        view = self._views[job.words["of_view"]]  # the job keeps it
        with self._service.dataplane.on(job.scoring.model, view, request) as inference:
            inference.run([array.reshape(-1) for array in job.feed.values()], job.targets)
        return inference.lookup_ns

    def _run_joined(self, jobs: list[_Job]) -> bool:
        """Run jobs together. False if that is impossible, or has failed."""
        scoring, began_ns = jobs[0].scoring, time.perf_counter_ns()
        session, items = scoring.session, [job.items for job in jobs]
        if session.loose is not scoring.loose:
            return False
        try:
            feed = {name: np.concatenate([job.feed[name] for job in jobs]) for name in jobs[0].feed}
            results = session.run_feed(scoring.names, feed)
            for name, target, result in zip(scoring.names, jobs[0].targets, results, strict=True):
                session.check_shape(name, (sum(items), *target.shape[1:]), result)
        except TierstoreError:
            return False
        dense_ns, at = time.perf_counter_ns() - began_ns, 0
        self._service.batches.add(len(jobs), sum(items))
        for job, count in zip(jobs, items, strict=True):
            for target, result in zip(job.targets, results, strict=True):
                target[...] = result[at : at + count]
            at += count
            self._answer(job, began_ns, dense_ns)
        return True

    def _answer(self, job: _Job, began_ns: int, dense_ns: int, more_lookup_ns: int = 0) -> None:
        """Count a prediction whose scores are there, and have its reactor send the answer."""
        words, scoring, service = job.words, job.scoring, self._service
        if scoring.finite and not job.is_finite:
            self._end(job, None)
            return
        came_ns, planned_ns, queued_ns = words["began_ns"], words["planned_ns"], words["queued_ns"]
        now_ns = time.perf_counter_ns()
        lookup_ns = queued_ns - planned_ns + more_lookup_ns
        spent = Timings(
            began_ns - queued_ns, planned_ns - came_ns, lookup_ns + dense_ns,
            now_ns - began_ns - dense_ns - more_lookup_ns, lookup_ns, dense_ns
        )  # fmt: skip
        if not self._cut:  # counted before it is sent: a client that has the answer finds it counted
            service.inference_stats.succeeded(scoring.model, scoring.version, now_ns - came_ns, spent)
            service.request_times.add(scoring.protocol, "ok", (now_ns - words["arrived_ns"]) / 1e9)
            if service.request_log.logs(words["arrived_ns"]):
                self._log(job, spent)
        self._give_back(job, _DONE)

    def _log(self, job: _Job, spent: Timings) -> None:
        with self._lock:
            if self._cut:  # its bytes may be gone
                return
            headers, peer = self._sender(job.words)
        service, (method, path, said) = self._service, job.scoring.logged
        request_id = next((value.decode("latin-1") for name, value in headers if name == _REQUEST_ID), None)
        request = LoggedRequest(
            method, path, job.words["arrived_ns"], lambda: service.proxies.client(peer, headers), request_id
        )
        service.request_log.note(request, 200, said=said, spent=spent)

    def _sender(self, words: Words) -> tuple[list[tuple[bytes, bytes]], tuple[str, int] | None]:
        """(headers, address and port) of a request that is not answered yet."""
        if words["stream"]:
            stream, _ = self._pipes.streams.of_job(words, self._request(words))
            return stream.headers, stream.client
        reply = Reply(self._pipes, words["reactor"], words["fd"], words["serial"])
        return split_head(self._request(words, MOST_HEAD_BYTES))[1], reply.client

    def _request(self, words: Words, most: int = 1 << 62) -> bytes:
        """A copy of the head and the body, or of the first bytes, of a request that is not answered yet."""
        at, size = words["request"], words["request_bytes"]
        if not words["stream"]:
            at, size = self._pipes.conns[["in_at", "needed"]][words["fd"]].tolist()
        return ctypes.string_at(at, min(size, most))

    def _end(self, job: _Job, error: BaseException | None) -> None:
        """Leave a job to Python, which answers with an error; None: Python answers it from the start."""
        words, scoring = job.words, job.scoring
        if isinstance(error, Gone):  # the reactor knows
            if words["stream"]:  # a call is counted in any case
                seconds = (time.perf_counter_ns() - words["arrived_ns"]) / 1e9
                self._service.request_times.add(scoring.protocol, "cancelled", seconds)
        elif error is not None:
            if isinstance(error, TierstoreError) and error.version is None:
                error.version = scoring.version
            with self._lock:
                if len(self._errors) == _MOST_ERRORS:
                    del self._errors[next(iter(self._errors))]
                self._errors[words["fd"], words["stream"]] = words["serial"], error
        self._give_back(job, _RETURNED)

    def _give_back(self, job: _Job, outcome: int) -> None:
        """Give a job back to its reactor, unless it was answered in its place."""
        with self._lock:
            self._running.remove(job.number)
            if self._closed:
                _free(job.words)
            if self._cut:  # until then `close` frees it
                return
            self._jobs["outcome"][job.number] = outcome
            os.write(int(self._done[job.words["reactor"]]), _NUMBER.pack(job.number))

    # --- on the event loop

    def error_of(self, fd: int, serial: int, stream: int) -> BaseException | None:
        """The error with which a request that came back from here is answered."""
        if not self._errors:
            return None
        with self._lock:
            of, error = self._errors.pop((fd, stream), (serial, None))
        return error if of == serial else None

    def cut_off(self) -> list[tuple[Words, bytes]]:
        """Answer nothing from now on. Returns the words and the request of each remaining job.

        Without jobs that were not queued yet: readers of cold rows read their request, which is freed once it is
        answered.
        """
        with self._lock:
            self._cut = True
            queued = self._jobs["queued_ns"] != 0
            left = self._jobs[self._mine() & (self._jobs["outcome"] == _FOR_PYTHON) & queued]
            return [(words, self._request(words)) for words in map(_words, left)]

    def _mine(self) -> npt.NDArray[np.bool_]:
        jobs = self._jobs
        mine: npt.NDArray[np.bool_] = (jobs["announced"] != 0) & (jobs["scoring"] != 0)
        return mine

    def close(self) -> None:
        """Free the remaining jobs, once the reactors have ended; a thread frees the one that it works on."""
        with self._lock:
            self._cut = self._closed = True
            for number in np.flatnonzero(self._mine()).tolist():
                if number not in self._running:
                    _free(_words(self._jobs[number]))


def _words(row: Any) -> Words:
    """The words of a job by name."""
    return dict(zip(_FIELDS, row.tolist(), strict=True))


def _free(words: Words) -> None:
    """Free a job's memory."""
    free(words["block"])
    free(words["request"] or None)
