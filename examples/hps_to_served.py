"""A model of HugeCTR's Hierarchical Parameter Server, by its `ps.json`: served by two commands.

python examples/hps_to_served.py      # in any directory; writes `data/`, `wdl/` and `ps.json` there

Needs `pip install 'tritonclient[http]'`, as those clients do.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import tritonclient.http as triton

import tierstore


def write_model() -> None:
    """Write a model as HugeCTR and HPS do."""
    for table, dim in ((0, 1), (1, 16)):
        folder = Path(f"wdl/1/wdl{table}_sparse_2000.model")
        folder.mkdir(parents=True)
        np.arange(1000, dtype=np.int64).tofile(folder / "key")
        np.arange(1000 * dim, dtype=np.float32).tofile(folder / "emb_vector")
    model = {
        "model": "wdl",
        "sparse_files": ["/model/wdl/1/wdl0_sparse_2000.model", "/model/wdl/1/wdl1_sparse_2000.model"],
        "embedding_table_names": ["wide", "deep"],
        "embedding_vecsize_per_table": [1, 16],
        "default_value_for_each_table": [0.0, 1.0],
    }
    Path("ps.json").write_text(json.dumps({"supportlonglong": True, "models": [model]}))


def ask_as_before(address: str) -> np.ndarray:
    """The request that clients of HPS's Triton backend send: keys of both tables, and how many are of each."""
    keys = np.array([[7, 999, 7, 1000]], np.int64)
    numbers = np.array([[2, 2]], np.int32)
    inputs = [triton.InferInput("KEYS", keys.shape, "INT64"), triton.InferInput("NUMKEYS", numbers.shape, "INT32")]
    inputs[0].set_data_from_numpy(keys)
    inputs[1].set_data_from_numpy(numbers)
    with triton.InferenceServerClient(address) as client:
        answer = client.infer("wdl", inputs, outputs=[triton.InferRequestedOutput("OUTPUT0")])
    vectors: np.ndarray = answer.as_numpy("OUTPUT0")
    return vectors


def main() -> None:
    write_model()
    command = [sys.executable, "-m", "tierstore"]
    subprocess.run([*command, "import-hps", "ps.json"], check=True)
    service = subprocess.Popen(
        [*command, "serve", "--port", "0", "--grpc-port", "off"], stdout=subprocess.PIPE, text=True
    )
    assert service.stdout is not None
    try:
        url = service.stdout.readline().split()[-1]
        with tierstore.Client(url) as client:
            rows = client.lookup_many("wdl", {"wide": [7, 999], "deep": [7, 1000]})
            assert rows["wide"].tolist() == [[7], [999]]
            assert rows["deep"].tolist() == [list(range(112, 128)), [1] * 16]
        vectors = ask_as_before(url.removeprefix("http://"))
        assert vectors.tolist() == [7, 999, *range(112, 128), *[1] * 16]
    finally:
        service.terminate()
        service.wait()
    print("both tables are served, with HPS's default for what they do not hold, to HPS's clients too")


if __name__ == "__main__":
    main()
