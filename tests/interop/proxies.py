"""nginx, haproxy and Envoy in front of a service: as they come, and with the files of deploy/proxies."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.redis_cluster import end_with_parent, free_ports
from tests.service.conftest import eventually

FILES = Path(__file__).parents[2] / "deploy/proxies"
WHEEL = Path(__file__).parents[2] / ".clients/envoy/envoy/_bin"  # what `make client-venvs` installs
LISTENS, SERVES = 8080, 8000  # the ports in those files
# The least that works: all else is as the proxy has it.
NGINX = "server { listen 8080; location / { proxy_pass http://127.0.0.1:8000; } }"
HAPROXY = """
defaults
    mode http
    timeout connect 2s
    timeout client 60s
    timeout server 60s
listen embeddings
    bind :8080
    server one 127.0.0.1:8000
"""
# nginx wants more around it than the file of one site: here everything stays in its directory
AROUND_NGINX = """
daemon off;
master_process off;
pid nginx.pid;
error_log stderr warn;
events {}
http {
    access_log off;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
    include site.conf;
}
"""


@dataclass
class Proxy:
    program: str
    text: str

    def command(self, where: Path) -> list[str]:
        program = shutil.which(self.program, path=f"{os.environ['PATH']}:/usr/sbin:{WHEEL}")
        if program is None:
            pytest.skip(f"no {self.program} on the PATH, in /usr/sbin or in {WHEEL}")
        if self.program == "envoy":
            return [
                program,
                "--use-dynamic-base-id",
                "--concurrency",
                "1",
                "--log-level",
                "warning",
                "-c",
                "envoy.yaml",
            ]
        if self.program == "nginx":
            return [program, "-p", str(where), "-c", "nginx.conf"]
        return [program, "-db", "-f", "haproxy.cfg"]


PROXIES = {
    "nginx as it comes": Proxy("nginx", NGINX),
    "nginx": Proxy("nginx", (FILES / "nginx.conf").read_text(encoding="utf-8")),
    "haproxy as it comes": Proxy("haproxy", HAPROXY),
    "haproxy": Proxy("haproxy", (FILES / "haproxy.cfg").read_text(encoding="utf-8")),
    "envoy": Proxy("envoy", (FILES / "envoy.yaml").read_text(encoding="utf-8")),
}
# the same files for clients that speak HTTP/2 from the first byte on, as those with TLS do
OF_HTTP2 = {
    "nginx, HTTP/2": Proxy("nginx", PROXIES["nginx"].text.replace("listen 8080;", "listen 8080 http2;")),
    "haproxy, HTTP/2": Proxy("haproxy", PROXIES["haproxy"].text.replace("bind :8080", "bind :8080 proto h2")),
}
# for gRPC, whose clients speak HTTP/2 from the first byte on
OF_GRPC = {
    "nginx": Proxy("nginx", (FILES / "grpc-nginx.conf").read_text(encoding="utf-8")),
    "haproxy": Proxy("haproxy", (FILES / "grpc-haproxy.cfg").read_text(encoding="utf-8")),
    "envoy": PROXIES["envoy"],
}
# haproxy as a proxy of HTTP/2: it shares out calls, not connections
HAPROXY_HTTP2 = """
defaults
    mode http
    timeout connect 2s
    timeout client 60s
    timeout server 60s
listen embeddings
    bind :8080 proto h2
    http-reuse always
    server one 127.0.0.1:8000 proto h2
"""


@contextmanager
def started(proxy: Proxy, service_port: int, where: Path) -> Iterator[str]:
    """The URL of a proxy in front of the service on a port, in a directory that it may write to. Skips where it is not installed."""
    (port,) = free_ports(1)
    site = proxy.text.replace(f"127.0.0.1:{SERVES}", f"127.0.0.1:{service_port}")
    command = proxy.command(where)
    if proxy.program == "nginx":
        (where / "nginx.conf").write_text(AROUND_NGINX, encoding="utf-8")
        (where / "site.conf").write_text(
            site.replace(f"listen {LISTENS}", f"listen 127.0.0.1:{port}"), encoding="utf-8"
        )
    elif proxy.program == "envoy":
        listens = site.replace(f"address: 0.0.0.0, port_value: {LISTENS}", f"address: 127.0.0.1, port_value: {port}")
        (where / "envoy.yaml").write_text(
            listens.replace(f"port_value: {SERVES}", f"port_value: {service_port}"), encoding="utf-8"
        )
    else:
        (where / "haproxy.cfg").write_text(site.replace(f"bind :{LISTENS}", f"bind 127.0.0.1:{port}"), encoding="utf-8")
    with (where / "log").open("wb") as log:
        running = subprocess.Popen(command, cwd=where, stdout=log, stderr=log, preexec_fn=end_with_parent)
    try:
        eventually(lambda: running.poll() is not None or _listens(port), f"{proxy.program} listens")
        assert running.poll() is None, (where / "log").read_text(encoding="utf-8")
        yield f"http://127.0.0.1:{port}"
    finally:
        running.terminate()
        running.wait(timeout=60)


def _listens(port: int) -> bool:
    with socket.socket() as made:
        return made.connect_ex(("127.0.0.1", port)) == 0
