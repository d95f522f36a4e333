"""Asks with this project's client and with tritonclient 2.50 in one process, under NumPy 1. Run in an environment that has them."""

from __future__ import annotations

import json
import sys

import numpy as np
import tritonclient.http as triton

from tierstore.client import Client


def main(url: str) -> None:
    keys = np.array([1, 7, 10**9])
    with Client(url) as client:
        model = client.model("ctr")
        rows, found = model.lookup("item_id", keys, return_found=True)
        halves = model.lookup("item_id", keys, dtype="float16")
        bags = model.lookup_bags("clicked", keys, [0, 2], combiner="sum")
        many = client.lookup_many("ctr", {"item_id": [7], "clicked": (keys, np.array([0, 1]))})
    with triton.InferenceServerClient(url.removeprefix("http://")) as other:
        given = triton.InferInput("item_id", [len(keys)], "INT64")
        given.set_data_from_numpy(keys)
        theirs = other.infer("ctr", [given]).as_numpy("item_id")
    answer = {
        "numpy": np.__version__,
        "found": found.tolist(),
        "same as tritonclient's": bool(np.array_equal(rows, theirs)),
        "rows": rows.tolist(),
        "halves": [str(halves.dtype), halves.astype(np.float32).tolist()],
        "bags": bags.tolist(),
        "many": {name: rows.tolist() for name, rows in many.items()},
    }
    print(json.dumps(answer))


main(sys.argv[1])
