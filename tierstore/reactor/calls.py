"""Answers gRPC look-ups in a reactor, by a plan from memory, and begins gRPC predictions. See `loop.py`.

A request message goes in and an answer message comes out; HTTP/2 around them is in `http2.py`. Kernels for the thread of one reactor.
"""

from __future__ import annotations

from typing import Any

import numba as nb
from numba import types

from tierstore.kernels import LAST, compiled_c
from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.sysio import monotonic_ns
from tierstore.lookup import by_plan, plans
from tierstore.lookup.cold_reads import job_at
from tierstore.lookup.grpc_answer import describe, frame_outputs
from tierstore.reactor.answers import LONG, MAY, bind_plan, draw, is_refused, look_up, plan_for, why_not
from tierstore.reactor.jobs import make_job
from tierstore.reactor.layout import (
    ANSWERED,
    BUSY,
    DESCRIPTION,
    HEAD_ROOM,
    MADE_A_JOB,
    PREDICTION,
    ROWS_ON_DISK,
    TURNED_AWAY,
    VALUES,
    reactor_at,
)
from tierstore.reactor.predictions import bind_scores, make_prediction, timeout_of
from tierstore.wire.http1.head import PREDICT
from tierstore.wire.protobuf import predict as protobuf_predict
from tierstore.wire.protobuf import scan as protobuf_scan
from tierstore.wire.request_record import SCANNED, row_at


@nb.njit
def _refuse(me, scoring):
    """Refuse a prediction with the scoring's header block, which may change after this call."""
    me.call.answer_at, me.call.answer_bytes = me.answer, scoring.head_bytes
    copy_bytes(me.answer, scoring.head_at, scoring.head_bytes)
    me.line.answers += 1
    return TURNED_AWAY


@nb.njit
def _predict(me, fd, plan, variant, view, tail, message_bytes, short, began):
    """Begin a prediction: MADE_A_JOB, or a reason. `short`: its look-ups take little time."""
    call, keys = me.call, me.bound.keys
    data = bind_scores(me, variant)
    if data < 0:
        return VALUES
    begin = describe(variant, me.record, me.values, me.answer + HEAD_ROOM)
    made, number = make_prediction(
        me, fd, plan, variant, view, tail, short, begin, data, message_bytes, call.since_ns, timeout_of(me), began
    )
    if made == MADE_A_JOB:
        job = job_at(me.jobs, number)
        frame_outputs(variant, me.values, job.block + job.head_bytes)
        call.job = number
        draw(me, plan, began, keys)
    return made


@nb.njit
def answer_call(me, fd, text, message, message_bytes, began):
    """Answer the ModelInferRequest or PredictRequest (`me.found.kind`) of `message_bytes` at `message`, if it has a plan.

    `me.found` describes its headers as it does a head of HTTP/1 (`wire/http1/head.py`), with places counted from `text`; the body is the message.
    `me.call` has SINCE_NS. Results:

        ANSWERED     `me.call` says where the answer is; there is room for 512 bytes before it
        TURNED_AWAY  `me.call` says where the header block of the status is
        MADE_A_JOB   a prediction, or memory lacks rows: `me.call` has the job's number; the job's tail counts from the message
        a reason     nothing was done, and Python must answer
    """
    call = me.call
    why = why_not(me, fd, text, call.since_ns, began)
    if why != MAY:
        return why
    typed = me.found.kind != PREDICT
    if typed:
        scanned = protobuf_scan.scan_at(message, message_bytes, me.record)
    else:
        scanned = protobuf_predict.scan_at(message, message_bytes, me.record)
    if scanned != SCANNED:
        return DESCRIPTION
    own, form = row_at(me.record, 0), plans.MESSAGE if typed else plans.PREDICT_MESSAGE
    model, model_bytes = own.name_at, own.name_bytes
    why, plan, variant, view = plan_for(me, model, model_bytes, form, began)
    predicts = why == MAY and variant.scoring != 0
    if predicts and is_refused(me, plan, variant, call.since_ns, began):
        return _refuse(me, variant.scoring)
    if predicts and variant.scoring.number == 0:
        return PREDICTION
    tail = message
    if why == MAY and not typed:
        if not protobuf_predict.read_at(message, variant.datatypes, me.record, me.data):
            return VALUES
        if me.record.decoded != 0:
            tail = me.data
    if why == MAY:
        why = bind_plan(me, variant, view, tail, call.since_ns, message_bytes, began)
    if why != MAY and why != LONG:
        return why
    short = why == MAY
    if predicts:
        return _predict(me, fd, plan, variant, view, tail, message_bytes, short, began)
    planned, came = monotonic_ns(), by_plan.COLD
    if short:
        came = look_up(me, plan, variant, view, tail, began, planned)
    if came != by_plan.ANSWERED and came != by_plan.COLD:
        return ROWS_ON_DISK if came == by_plan.ELSEWHERE else VALUES
    data = me.answer + HEAD_ROOM
    begin = describe(variant, me.record, me.values, data)
    if came == by_plan.COLD:
        number = make_job(me, fd, plan, variant, view, begin, short, began, planned)
        if number < 0:
            return BUSY
        job = job_at(me.jobs, number)
        frame_outputs(variant, me.values, job.block + job.head_bytes)
        call.job = number
        draw(me, plan, began, me.bound.keys)
        return MADE_A_JOB
    frame_outputs(variant, me.values, data)
    call.answer_at, call.answer_bytes = begin, data + me.bound.answer_bytes - begin
    me.line.answers += 1
    return ANSWERED


@compiled_c(types.int64(*[types.int64] * 6), when=LAST)
def run(at: Any, fd: Any, text: Any, message: Any, message_bytes: Any, began: Any) -> Any:
    """`answer_call` with the reactor's record by address; compiled separately."""
    return answer_call(reactor_at(at), fd, text, message, message_bytes, began)
