"""What tokens and TLS cost a look-up: without both, with a token of all models or of this one alone, with TLS.

    python -m benchmarks.access [--rounds 40] [--json FILE]

Services with tokens, without, and with TLS, in this process, over one snapshot; requests of 64 and 4,096 keys in binary, by turns,
on one connection each, answered over and over until the reactors know them. Medians are over rounds of 50 requests. Python
answers what comes with TLS; "Python, without TLS" says how much of the difference is Python's (it is the listener of admin
requests). Handshakes are counted apart, each with a new connection and a health check. Needs the program openssl;
over gRPC too where its extra is installed.
"""

from __future__ import annotations

import http.client
import json
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from benchmarks import report
from benchmarks.machine import describe
from benchmarks.options import parser_of
from tierstore.access.roles import Role
from tierstore.access.tokens import TokenFile
from tierstore.config import load_settings
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread

ROWS, DIM = 100_000, 16
SIZES = (64, 4096)
BLOCK = 50  # requests of a round


def connect(port: int, tls: ssl.SSLContext | None) -> http.client.HTTPConnection:
    if tls is None:
        return http.client.HTTPConnection("127.0.0.1", port)
    return http.client.HTTPSConnection("127.0.0.1", port, context=tls)


def asker(
    port: int, keys: np.ndarray, token: str | None, stack: ExitStack, tls: ssl.SSLContext | None = None
) -> Callable[[], None]:
    """A function that asks for the rows of `keys` once and checks that they came."""
    connection = connect(port, tls)
    stack.callback(connection.close)
    tensor = {
        "name": "item",
        "datatype": "INT64",
        "shape": [len(keys)],
        "parameters": {"binary_data_size": keys.nbytes},
    }
    wanted = {"name": "item", "parameters": {"binary_data": True}}
    text = json.dumps({"inputs": [tensor], "outputs": [wanted]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text)), "Content-Type": "application/octet-stream"}
    headers["Accept-Encoding"] = "gzip, deflate"  # the module's own, `identity`, is a wish that Python has to look at
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    body = text + keys.tobytes()

    def ask() -> None:
        connection.request("POST", "/v2/models/bench/infer", body, headers)
        answer = connection.getresponse()
        data = answer.read()
        assert answer.status == 200, data[:200]
        assert len(data) > 4 * DIM * len(keys)

    return ask


def grpc_asker(target: str, keys: np.ndarray, stack: ExitStack, trusted: Path | None) -> Callable[[], None]:
    """What asks over gRPC; with TLS where `trusted` is a file of authorities."""
    import grpc

    from tierstore.service.rpc.protobuf import message_class

    request = message_class("inference.ModelInferRequest")(model_name="bench")
    request.inputs.add(name="item", datatype="INT64", shape=[len(keys)])
    request.raw_input_contents.append(keys.tobytes())
    message = request.SerializeToString()
    if trusted is None:
        channel = grpc.insecure_channel(target)
    else:
        channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(trusted.read_bytes()))
    call = stack.enter_context(channel).unary_unary("/inference.GRPCInferenceService/ModelInfer")

    def ask() -> None:
        assert len(call(message)) > 4 * DIM * len(keys)

    return ask


def certificate(root: Path) -> Path:
    """A file with a key and its certificate for 127.0.0.1, by the program openssl."""
    file = root / "both.pem"
    kind = [
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=bench",
    ]
    made = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(file), "-out", f"{file}c"]
    subprocess.run(["openssl", *kind, *made], check=True, capture_output=True)
    file.write_text(file.read_text() + Path(f"{file}c").read_text())
    return file


def new_connections(port: int, tls: ssl.SSLContext | None, times: int) -> float:
    """Median of µs for a connection, a health check on it, and its end."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        connection = connect(port, tls)
        connection.request("GET", "/v2/health/live")
        assert connection.getresponse().status == 200
        connection.close()
        took.append((time.perf_counter() - began) * 1e6)
    return float(np.median(took))


def measure(root: Path, rounds: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    with tierstore.SnapshotWriter(root / "snapshot", model="bench", version=1) as writer:
        rows = np.random.default_rng(1).normal(size=(ROWS, DIM)).astype(np.float32)
        writer.table("item", dim=DIM).write(np.arange(ROWS), rows)
        writer.feature("item", table="item")
    with Store(load_settings(None, data=root / "loaded")) as store:
        store.load_snapshot(root / "snapshot")
    file = TokenFile(root / "tokens.json")
    _, reader = file.create(Role.READER)
    _, limited = file.create(Role.READER, ["bench"])
    both = certificate(root)
    trusted = ssl.create_default_context(cafile=str(both))
    cases: dict[tuple[str, int], Callable[[], None]] = {}
    handshakes: dict[str, float] = {}
    options: dict[str, dict[str, Any]] = {
        "open": {"admin_listen": "127.0.0.1:0"},
        "tokens": {"tokens": root / "tokens.json"},
        "tls": {"tls_cert": both, "tls_key": both},
    }
    with ExitStack() as stack:
        for name, more in options.items():
            settings = load_settings(None, data=root / name, port=0, grpc_port=0, **more)
            shutil.copytree(root / "loaded", root / name)
            store = stack.enter_context(Store(settings))
            server = stack.enter_context(ServerThread(store, settings))
            tls = trusted if name == "tls" else None
            secrets = {
                "open": {"without both": None},
                "tokens": {"a token": reader, "a token of one model": limited},
                "tls": {"TLS": None},
            }[name]
            for size in SIZES:
                keys = np.random.default_rng(size).integers(0, ROWS, size)
                cases |= {
                    (case, size): asker(server.port, keys, secret, stack, tls) for case, secret in secrets.items()
                }
                if server.grpc_target is not None and name != "tokens":
                    over = "gRPC" if tls is None else "gRPC, TLS"
                    cases[over, size] = grpc_asker(server.grpc_target, keys, stack, both if tls else None)
                if name == "open":
                    port = int(server.admin_url.rpartition(":")[2])
                    cases["Python, without TLS", size] = asker(port, keys, None, stack)
            if name != "tokens":
                handshakes["TLS" if tls else "plain"] = new_connections(server.port, tls, rounds * 5)
        took: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
        for _ in range(rounds + 1):  # the first is for warmth
            for case, ask in cases.items():
                began = time.perf_counter()
                for _ in range(BLOCK):
                    ask()
                took[case].append((time.perf_counter() - began) / BLOCK * 1e6)
    medians = {case: float(np.median(times[1:])) for case, times in took.items()}
    results = [
        {"case": case, "keys": size, "p50_us": median, "more_us": median - medians["without both", size]}
        for (case, size), median in medians.items()
    ]
    return results, handshakes


def main() -> int:
    args = parser_of(__file__, __doc__, "tiny", rounds=40).parse_args()
    rounds = 2 if args.tiny else args.rounds
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-") as root:
        results, handshakes = measure(Path(root), rounds)
    marks = [
        report.headline(f"a token, {one['keys']} keys", "without both", one["more_us"], at_most=2.0, unit="µs more")
        for one in results
        if one["case"] == "a token"
    ]
    document = {"benchmark": "access", "machine": describe(), "rounds": rounds, "headlines": marks, "results": results}
    document["new_connection_us"] = handshakes
    print(report.markdown(document))
    report.write(args.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
