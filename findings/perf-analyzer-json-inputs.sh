#!/usr/bin/env bash
# perf_analyzer sends one element of a tensor, whatever its shape, when it is told to send inputs as JSON.
#
# Guess: `--input-tensor-format json` sends the same requests as the binary form, written as `"data": […]`, so it measures what
# curl and browsers cost a server.
# What happens: `data` has the first element alone beside the whole shape. A server that compares the two refuses every request,
# and one that does not looks up a single key: its figures are those of another request. With a shape of [1] all is well.
# Why it matters: a lookup of embeddings is hundreds of keys a request, and this is the tool that Triton's users compare servers
# with. Figures of JSON have to come from another client.
# Source: https://github.com/triton-inference-server/perf_analyzer/blob/main/docs/cli.md (--input-tensor-format)
# Needs libb64.so.0d (Debian: libb64-0d), which the program is linked with.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps tritonclient==2.50.0 nvidia-cuda-runtime-cu12==12.9.79

cat > "$work/run.py" <<'PY'
import json
import os
import pathlib
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

sent = {}
KEYS = {"name": "keys", "datatype": "INT64", "shape": [-1]}
ROWS = {"name": "rows", "datatype": "INT64", "shape": [-1]}


class Server(BaseHTTPRequestHandler):
    """A model that answers every request with one number."""

    protocol_version = "HTTP/1.1"

    def answer(self, document):
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        counts = dict.fromkeys(("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss"), {"count": len(sent), "ns": 0})
        model = {"name": "m", "version": "1", "last_inference": 0, "inference_count": len(sent), "execution_count": len(sent), "inference_stats": counts, "batch_stats": []}
        config = {"name": "m", "platform": "p", "backend": "b", "version_policy": {"latest": {"num_versions": 1}}, "max_batch_size": 0}
        config["input"] = [{"name": "keys", "data_type": "TYPE_INT64", "dims": [-1]}]
        config["output"] = [{"name": "rows", "data_type": "TYPE_INT64", "dims": [-1]}]
        if self.path.endswith("/config"):
            self.answer(config)
        elif self.path.endswith("/stats"):
            self.answer({"model_stats": [model]})
        elif self.path == "/v2":
            self.answer({"name": "triton", "version": "2", "extensions": []})
        else:
            self.answer({"name": "m", "versions": ["1"], "platform": "p", "inputs": [KEYS], "outputs": [ROWS]})

    def do_POST(self):
        (tensor,) = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["inputs"]
        sent[str(tensor["shape"])] = tensor["data"]
        self.answer({"model_name": "m", "model_version": "1", "outputs": [ROWS | {"shape": [1], "data": [0]}]})

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
here = pathlib.Path(sys.prefix)
(libraries,) = here.glob("lib/python3*/site-packages/nvidia/cuda_runtime/lib")
for keys in ([11, 12, 13, 14], [11]):
    pathlib.Path("data.json").write_text(json.dumps({"data": [{"keys": {"content": keys, "shape": [len(keys)]}}]}))
    subprocess.run(
        [here / "bin" / "perf_analyzer", "-m", "m", "-u", f"127.0.0.1:{server.server_port}", "--input-data", "data.json", "--input-tensor-format", "json",
         "--output-tensor-format", "json", "-p", "100", "-r", "3", "-s", "999"],
        env=os.environ | {"LD_LIBRARY_PATH": str(libraries)}, check=False, capture_output=True, timeout=60,
    )
    print(f"keys {keys}, sent with shape [{len(keys)}]: data {sent.get(f'[{len(keys)}]')}")
PY

echo "tritonclient 2.50.0 (perf_analyzer)"
(cd "$work" && venv/bin/python run.py) | tee "$work/seen"
diff "$work/seen" - <<'WANT'
keys [11, 12, 13, 14], sent with shape [4]: data [11]
keys [11], sent with shape [1]: data [11]
WANT
