"""`tierstore serve`: settings from the file, the environment and the flags, then the service."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from tierstore.cli.options import Command, option
from tierstore.cli.signals import end_at_once

log = logging.getLogger("tierstore")


class ServeCommand(Command):
    """The command `serve`, whose `--help` ends with every setting, since most have no flag."""

    def hint(self, flag: str) -> str:
        from tierstore.config import ENV_PREFIX, described_settings

        name = flag.lstrip("-").replace("-", "_")
        if all(name != setting for setting, *_ in described_settings()):
            return ""
        return f"a setting without a flag, {ENV_PREFIX}{name.upper()} in the environment, {name} in tierstore.toml"

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # click's types, which newer releases of typer contain
        from tierstore.config import ENV_PREFIX, described_settings

        with formatter.section(f"Every setting, as tierstore.toml has it; in the environment it is {ENV_PREFIX}<NAME>"):
            formatter.write_dl([(name, f"{text} (default: {default})") for name, default, text in described_settings()])


Data = Annotated[Path | None, option("DIR", "The data directory (default: ./data).")]
Host = Annotated[str | None, option("ADDRESS", "Address to listen on (default: 127.0.0.1).")]
Port = Annotated[int | None, typer.Option(help="HTTP port; 0 picks a free one (default: 8000).", show_default=False)]
GrpcPort = Annotated[
    str | None,
    option("PORT", "A second port, for gRPC; 0 picks a free one, `off` has none (default: 8001)."),
]
Threads = Annotated[
    int | None, option("N", "Threads that answer look-ups without the interpreter (default: the processors).")
]
HostBudget = Annotated[
    str | None,
    option("SIZE", "CPU memory for cached rows, such as 4GiB (default: 4GiB, at most half of the machine's)."),
]
DeviceBudget = Annotated[
    str | None, option("SIZE", "Memory of the GPU for cached rows (extra `gpu`; default: 0, no device tier).")
]
SourceRoot = Annotated[
    list[str] | None,
    option(
        "PREFIX",
        "Snapshots are read only from under this directory or URL; may be repeated (default: the working directory).",
    ),
]
Watch = Annotated[Path | None, option("DIR", "Apply each delta that appears here, as <model>/<seq>.arrow.")]
WatchSnapshots = Annotated[
    list[str] | None,
    option(
        "LOCATION",
        "Load the newest snapshot of each model below this directory or URL when it is complete; may be repeated.",
    ),
]
ClientShm = Annotated[
    bool | None,
    typer.Option("--allow-client-shm", help="Serve the protocol's shared memory extension.", show_default=False),
]
OpenNetwork = Annotated[
    bool | None,
    typer.Option(
        "--allow-open-network",
        help="Listen beyond loopback without tokens: anyone who reaches the port may change models.",
        show_default=False,
    ),
]
Tokens = Annotated[
    Path | None,
    option("FILE", "The file of tokens, see `tierstore token` (default: tokens.json in the data directory)."),
]
AllowedHost = Annotated[
    list[str] | None, option("NAME", "A name under which the service may be asked; may be repeated.")
]
TlsCert = Annotated[Path | None, option("FILE", "The service's certificate (PEM): serve with TLS alone.")]
TlsKey = Annotated[Path | None, option("FILE", "The private key of that certificate (PEM).")]
TlsClientCa = Annotated[
    Path | None, option("FILE", "Authorities (PEM): every client needs a certificate of one of them.")
]
AdminListen = Annotated[
    str | None, option("ADDRESS", "HOST:PORT or unix:PATH for admin requests, which other ports then refuse.")
]
Server = Annotated[
    str | None,
    option("NAME", "`uvicorn` serves HTTP without compiled threads, as for a debugger (default: reactors)."),
]
Partition = Annotated[
    str | None,
    option(
        "RANGES/N",
        "Which partitions of the keys versions are loaded with, of how many: 0-15/64 or 0-15,40/64 (default: all "
        "keys).",
    ),
]
Remote = Annotated[
    str | None,
    option(
        "URL",
        "A cluster that has the rows, redis://h1:6379,h2:6379: serve the models that it has (extra `redis`).",
    ),
]
Upstream = Annotated[
    str | None,
    option("URL", "Nodes that have the rows, http://a:8000,http://b:8000: be a cache in front of them."),
]
Peer = Annotated[
    list[str] | None,
    option("URL", "A node that serves the same models, http://a:8000: fetch what this one lacks; may be repeated."),
]
SsdCache = Annotated[
    str | None,
    option("SIZE", "Disk for rows that come from the cluster or those nodes, such as 200GiB (default: 0, none)."),
]
Kafka = Annotated[str | None, option("BROKERS", "Kafka brokers, host:port,…, to read deltas from (extra `kafka`).")]
KafkaTopic = Annotated[str | None, option("TOPIC", "The topic of deltas, of any number of models.")]
KafkaRows = Annotated[
    list[str] | None,
    option(
        "TOPIC=MODEL/TABLE",
        "A topic of rows, one a message; or TOPIC, where headers name model and table; may be repeated.",
    ),
]
KafkaRowsFormat = Annotated[
    str | None, option("FORMAT", "How those rows are written: json (default), avro, protobuf, avro-raw, protobuf-raw.")
]
KafkaConfig = Annotated[
    Path | None, option("FILE", "Properties of librdkafka, name=value a line, as for TLS and SASL.")
]
KafkaRewind = Annotated[
    str | None, option("TIME", "How far back to read for a model that is new here, such as 2h (default: all).")
]
Config = Annotated[Path | None, option("FILE", "Settings to read (default: ./tierstore.toml if it is there).")]


def serve(
    data: Data = None,
    host: Host = None,
    port: Port = None,
    grpc_port: GrpcPort = None,
    threads: Threads = None,
    host_budget: HostBudget = None,
    device_budget: DeviceBudget = None,
    source_root: SourceRoot = None,
    watch: Watch = None,
    watch_snapshots: WatchSnapshots = None,
    allow_client_shm: ClientShm = None,
    allow_open_network: OpenNetwork = None,
    tokens: Tokens = None,
    allowed_host: AllowedHost = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    admin_listen: AdminListen = None,
    server: Server = None,
    partition: Partition = None,
    remote: Remote = None,
    upstream: Upstream = None,
    peer: Peer = None,
    ssd_cache: SsdCache = None,
    kafka: Kafka = None,
    kafka_topic: KafkaTopic = None,
    kafka_rows: KafkaRows = None,
    kafka_rows_format: KafkaRowsFormat = None,
    kafka_config: KafkaConfig = None,
    kafka_rewind: KafkaRewind = None,
    config: Config = None,
) -> None:
    """Run the service until it is told to stop."""
    flags = dict(locals())
    flags["kafka_rewind_s"] = flags.pop("kafka_rewind")
    _run(flags.pop("config"), {name: value for name, value in flags.items() if value != []})


def _run(config: Path | None, flags: dict[str, Any]) -> None:
    signal.signal(signal.SIGTERM, end_at_once)  # until the service has its own handlers
    signal.signal(signal.SIGHUP, lambda *_: None)  # it is to renew what is read and written by then anyway
    from tierstore.config import load_settings
    from tierstore.logs import configure

    settings = load_settings(config, **flags)
    configure(settings.log_format, settings.log_level, settings.log_file)
    from tierstore import kernels
    from tierstore.kernels import ahead

    kernels.use_data(settings.data)
    if settings.server != "uvicorn":
        ahead.start(log.info)
    brought = settings.remote is not None or settings.upstream is not None or settings.peer
    is_new = not settings.data.is_dir() and not brought
    from tierstore.service.server import serve as run_service  # while kernels are compiled

    ahead.prepare(log.info)

    def announce(url: str, grpc_target: str | None) -> None:
        typer.echo(f"tierstore serves {settings.data} at {url}")
        if grpc_target is not None:
            typer.echo(f"gRPC at {grpc_target}")
        if is_new:
            typer.echo(
                f"{settings.data} is new and empty: `tierstore import PATH… --url {url}` or "
                f"`tierstore load SNAPSHOT --url {url}` brings a model"
            )

    run_service(settings, announce=announce)
