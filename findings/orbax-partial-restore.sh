#!/usr/bin/env bash
# Orbax: a partial restore gives back what the caller passed in, where the checkpoint has no leaf of that name.
#
# Guess: `partial_restore=True` leaves out what the target does not ask for, and a leaf that the target asks for and the
# checkpoint lacks is an error, as it is of a whole restore.
# What happens: such a leaf comes back as the target's own value, with no error and no line in the log. A table whose
# variable was renamed between training and serving, or a name that was misspelled, is the fresh array that was passed
# in to say the shape: zeros, or an initializer's numbers.
# Why it matters: who takes one table out of a large checkpoint restores it partially, since the rest need not fit into
# memory. Every row of the table that is then served is wrong, and all shapes are right. Compare the names with
# `metadata(path)` first, or pass a target whose value cannot be taken for rows.
# Source: https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpointing_pytrees.html
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check orbax-checkpoint==0.12.8 "jax[cpu]==0.10.2"

cat > "$work/run.py" <<'PY'
import logging
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

said = []


class Heard(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())


for name in (None, "absl"):
    logging.getLogger(name).addHandler(Heard())
where = Path(sys.argv[1]) / "step"
rows = np.arange(6, dtype=np.float32).reshape(3, 2) + 1
found = {}
with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as keeper:
    keeper.save(where, args=ocp.args.PyTreeSave({"item_embedding": rows, "step": 7}))
    for name in ("item_embedding", "item_embeddings"):
        target = {name: np.zeros((3, 2), np.float32)}
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray)}
        args = ocp.args.PyTreeRestore(item=target, restore_args=as_numpy, partial_restore=True)
        found[name] = keeper.restore(where, args=args)[name]
print("orbax-checkpoint", ocp.__version__)
for name, got in found.items():
    print(f"{name}: {got.tolist()}")
named = [line for line in said if "item_embeddings" in line]
print("lines of the log that name item_embeddings:", len(named))
right = np.array_equal(found["item_embedding"], rows) and not found["item_embeddings"].any() and not named
sys.exit(0 if right else "this has changed")
PY
"$work/venv/bin/python" "$work/run.py" "$work" 2> "$work/err" || { cat "$work/err" >&2; exit 1; }
