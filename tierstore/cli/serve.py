"""`tierstore serve`: settings from the file, the environment and the flags, then the service."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from tierstore.cli.place import ready_kernels


def _end_at_once(number: int, _: Any) -> None:
    """Until the service takes signals itself: nothing is served yet, so there is nothing to finish."""
    raise SystemExit(128 + number)


class ServeCommand(TyperCommand):
    """Its `--help` goes on with every setting there is, since most have no flag."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # of click, which newer releases of typer carry inside
        from tierstore.config import ENV_PREFIX, described_settings

        with formatter.section(f"Every setting, as tierstore.toml has it; in the environment it is {ENV_PREFIX}<NAME>"):
            formatter.write_dl([(name, f"{text} (default: {default})") for name, default, text in described_settings()])


def serve(
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The data directory (default: ./data).", show_default=False)
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Address to listen on (default: 127.0.0.1).", show_default=False),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="HTTP port; 0 picks a free one (default: 8000).", show_default=False)
    ] = None,
    grpc_port: Annotated[
        str | None,
        typer.Option(
            metavar="PORT",
            help="gRPC port; 0 picks a free one, `off` serves none (default: 8001 where the extra `grpc` is installed).",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Threads that answer look-ups without the interpreter (default: the processors).",
            show_default=False,
        ),
    ] = None,
    host_budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="CPU memory for cached rows, such as 4GiB (default: 4GiB, at most half of the machine's).",
            show_default=False,
        ),
    ] = None,
    device_budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of each GPU for cached rows (extra `gpu`; default: 0, no device tier).",
            show_default=False,
        ),
    ] = None,
    source_root: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PREFIX",
            help="Snapshots are read only from under this; may be given again (default: the working directory).",
            show_default=False,
        ),
    ] = None,
    allow_client_shm: Annotated[
        bool | None,
        typer.Option("--allow-client-shm", help="Serve the protocol's shared memory extensions.", show_default=False),
    ] = None,
    allow_open_network: Annotated[
        bool | None,
        typer.Option(
            "--allow-open-network",
            help="Listen beyond loopback without tokens: whoever reaches the port may change models.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Settings to read (default: ./tierstore.toml if it is there).", show_default=False
        ),
    ] = None,
) -> None:
    """Run the service until it is told to stop (SIGTERM or Ctrl-C)."""
    # The first process of a container has no default for SIGTERM: without this it would not end before it serves.
    signal.signal(signal.SIGTERM, _end_at_once)
    from tierstore.config import load_settings
    from tierstore.logs import configure

    settings = load_settings(
        config,
        data=data,
        host=host,
        port=port,
        grpc_port=grpc_port,
        threads=threads,
        host_budget=host_budget,
        device_budget=device_budget,
        source_root=source_root or None,
        allow_client_shm=allow_client_shm,
        allow_open_network=allow_open_network,
    )
    configure(settings.log_format, settings.log_level)
    ready_kernels(settings.data, logging.getLogger("tierstore").info)
    from tierstore.service.server import serve as run_service

    def announce(url: str, grpc_target: str | None) -> None:
        typer.echo(f"tierstore serves {settings.data} at {url}")
        if grpc_target is not None:
            typer.echo(f"gRPC at {grpc_target}")

    run_service(settings, announce=announce)
