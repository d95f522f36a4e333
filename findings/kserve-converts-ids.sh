#!/usr/bin/env bash
# KServe's `InferInput.as_numpy` makes ids of what is none, and a model that calls it answers a client's mistake with 500.
#
# Guess: input of INT64 that is no integer, in JSON, is refused with 400, by the server or by `as_numpy`, which has InvalidInput for that.
# What happens: it is `numpy.array(data, int64)`: 17.9 is 17, "17" is 17, true is 1; "false" as BOOL is True. What NumPy refuses (an integer
# beyond the type, null, data that do not fill the shape) is 500 over HTTP.
# Why it matters: an id that became a float on its way (a pandas column with one null) is rounded to another id or cut, and rows of that are served. 500 is
# what clients may repeat, what can take a node out of a mesh, and what alerts count: one caller with wrong ids does all that. Check in the model.
# Source: https://github.com/kserve/kserve/blob/master/python/kserve/kserve/protocol/infer_type.py (InferInput.as_numpy)
set -euo pipefail
work=$(mktemp -d)
trap 'kill "${server:-}" 2>/dev/null || true; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check kserve==0.21.0 setuptools==80.9.0

cat > "$work/serve.py" <<'PY'
import sys

from kserve import InferOutput, InferResponse, Model, ModelServer


class Echo(Model):
    def predict(self, request, headers=None, response_headers=None):
        given = request.inputs[0]
        output = InferOutput("got", list(given.shape), given.datatype)
        output.set_data_from_numpy(given.as_numpy(), binary_data=False)
        return InferResponse(request.id or "1", self.name, [output])


model = Echo("m")
model.ready = True
ModelServer(http_port=int(sys.argv[1]), grpc_port=int(sys.argv[2]), workers=1).start([model])
PY
cat > "$work/run.py" <<'PY'
import sys
import time

import httpx

url = f"http://127.0.0.1:{sys.argv[1]}/v2"
for _ in range(600):
    try:
        if httpx.get(f"{url}/health/ready").status_code == 200:
            break
    except httpx.TransportError:
        time.sleep(0.2)
for datatype, data, shape in (
    ("INT64", "[17.9]", 1), ("INT64", '["17"]', 1), ("INT64", "[true]", 1), ("BOOL", '["false"]', 1),
    ("INT64", "[9223372036854775808]", 1), ("INT64", "[null]", 1), ("INT64", "[1, 2]", 3),
):  # fmt: skip
    body = f'{{"inputs": [{{"name": "id", "shape": [{shape}], "datatype": "{datatype}", "data": {data}}}]}}'
    answer = httpx.post(f"{url}/models/m/infer", content=body, headers={"content-type": "application/json"}, timeout=30)
    got = answer.json()["outputs"][0]["data"] if answer.status_code == 200 else answer.json()["error"].split(" :")[0]
    print(f"{datatype} [{shape}] {data}: {answer.status_code} {got}")
PY
read -r http grpc < <(python3 -c '
import socket
sockets = [socket.socket() for _ in range(2)]
for one in sockets:
    one.bind(("127.0.0.1", 0))
print(*(one.getsockname()[1] for one in sockets))')
(cd "$work" && exec venv/bin/python serve.py "$http" "$grpc" > serve.log 2>&1) &
server=$!

echo "kserve 0.21.0"
(cd "$work" && timeout 200 venv/bin/python run.py "$http") | tee "$work/seen"
diff "$work/seen" - <<'WANT'
INT64 [1] [17.9]: 200 [17]
INT64 [1] ["17"]: 200 [17]
INT64 [1] [true]: 200 [1]
BOOL [1] ["false"]: 200 [True]
INT64 [1] [9223372036854775808]: 500 OverflowError
INT64 [1] [null]: 500 TypeError
INT64 [3] [1, 2]: 500 ValueError
WANT
