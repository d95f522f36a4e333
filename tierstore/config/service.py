"""Settings of the service: addresses, access, limits and logs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, Field
from pydantic_settings import NoDecode

from tierstore.config.values import (
    Size,
    check_host,
    check_networks,
    split_names,
)
from tierstore.logs import LogFormat, LogLevel
from tierstore.machine import processors

MOST_THREADS = 64  # reactors


class ServiceSettings(BaseModel):
    """Fields of `Settings`."""

    threads: int = Field(
        default_factory=lambda: min(MOST_THREADS, processors()),
        ge=1,
        le=MOST_THREADS,
        description="reactor threads, which answer look-ups over HTTP whose rows are in memory",
    )
    lookup_threads: int = Field(
        default_factory=lambda: max(2, processors()), ge=1, description="threads that run look-ups of the service"
    )
    lookup_queue: int = Field(1024, ge=1, description="look-ups that may wait for a thread; above it clients get 503")
    max_queue_s: float = Field(2.0, gt=0, description="seconds a look-up may wait for a thread; after that it gets 503")
    max_connections: int = Field(
        2048,
        ge=1,
        description="HTTP connections at a time; requests on more get 503. At most half of the files that the process "
        "may open",
    )
    idle_timeout_s: float = Field(
        75.0,
        gt=0,
        description="seconds to keep an HTTP connection that has no request; set it longer than the load balancer's "
        "timeout",
    )
    arrival_timeout_s: float = Field(
        60.0, gt=0, description="seconds a small HTTP request may take to arrive, from its first byte to its last"
    )
    batch_max_items: int = Field(
        0,
        ge=0,
        description="items (rows of the batch dimension) in one run that joins small predict requests; 0: join none",
    )
    host: Annotated[str, AfterValidator(check_host)] = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 picks a free one")
    grpc_port: Annotated[int, Field(ge=0, le=65535)] | Literal["off"] | None = Field(
        None,
        description="a second port, for gRPC, which the HTTP port speaks too; 0 picks a free one, `off` has none; "
        "default: 8001, a free one if port is 0",
    )
    allow_client_shm: bool = Field(False, description="serve OIP's system shared memory extension")
    allow_open_network: bool = Field(
        False, description="listen beyond loopback without tokens: anyone who reaches the port may change models"
    )
    tokens: Path | None = Field(
        None,
        description="file of tokens, made by `tierstore token create`; default: tokens.json in the data directory. As "
        "soon as there is one, every request but health needs a token. There is no start without one that is "
        "named here",
    )
    allowed_host: Annotated[list[str], NoDecode, BeforeValidator(split_names)] = Field(
        [],
        description="names under which the service may be asked beside loopback ones (header Host), `*` for any; "
        "separated by ',' in the environment",
    )
    trusted_proxies: Annotated[list[str], NoDecode, BeforeValidator(split_names), AfterValidator(check_networks)] = (
        Field(
            [],
            description="addresses or networks of proxies (`10.0.0.7`, `10.0.0.0/8`) whose `X-Forwarded-For` says "
            "which client a request is of, for the log and the audit; separated by ',' in the environment",
        )
    )
    tls_cert: Path | None = Field(
        None,
        description="file with the service's certificate and those that lead to its authority (PEM): HTTP and gRPC "
        "are served with TLS alone. Read again when it changes",
    )
    tls_key: Path | None = Field(None, description="file with the private key of tls_cert (PEM, not encrypted)")
    tls_client_ca: Path | None = Field(
        None,
        description="file with authorities (PEM): every client needs a certificate of one of them, and may have a "
        "role by its name (`tierstore token create --certificate`)",
    )
    admin_listen: str | None = Field(
        None,
        description="address `HOST:PORT` or `unix:PATH` of a listener for admin requests; then the other ports refuse "
        "them. It serves everything else that HTTP does, too, and has 64 connections of its own",
    )
    server: Literal["reactors", "uvicorn"] = Field(
        "reactors",
        description="what serves HTTP: compiled threads, or uvicorn with the same application and without gRPC, for a "
        "debugger or where no kernels can be compiled",
    )
    max_request: Size = Field(ByteSize(64 << 20), description="largest body of a look-up")
    max_response: Size = Field(
        ByteSize(256 << 20), description="largest answer of a look-up, including rows before they are pooled"
    )
    max_inflight: Size = Field(
        ByteSize(1 << 30), description="bytes that requests in progress may use together; above it clients get 503"
    )
    log_format: LogFormat = Field(
        "text", description="format of the log on standard error: lines of `text`, or `json` with one object a line"
    )
    log_level: LogLevel = Field(
        "info", description="lowest level that is logged: `debug`, `info`, `warning` or `error`"
    )
    access_log: bool = Field(
        False, description="log each request that Python answers; look-ups that reactors answer are not logged"
    )
    slow_request_ms: float = Field(
        0.0,
        ge=0,
        description="log requests that take at least this many milliseconds, except look-ups that reactors answer; 0: "
        "none",
    )
    log_file: Path | None = Field(
        None,
        description="file for the log, in place of standard error; opened anew where it was renamed, and on SIGHUP",
    )
    traces: bool = Field(
        False,
        description="report spans of requests and deltas whose `traceparent` is sampled, by OpenTelemetry (extra "
        "`otel`), where the variables OTEL_… say; such look-ups are answered by Python",
    )
    drain_s: float = Field(
        5.0, ge=0, description="seconds to go on serving after a stop signal, while the service reports not ready"
    )
