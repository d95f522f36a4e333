"""The record layouts of plans: what a model serves, its views and tables, and how requests of a structure are answered.

Python makes the records (`engine/serving/served.py`, `service/reactor/plan_index.py`); `by_plan.py`, `binding.py` and `scoring.py` read them. A token
stands for one version with one dense part: a variant fits a view if their tokens are equal.
"""

from __future__ import annotations

import numpy as np

from tierstore.kernels.records import at, define
from tierstore.tiers.disk.layout import BASE
from tierstore.tiers.host.cache.lookup import HOST_TABLE

TABLE = define("Table", "a table under a view", {
    "host": (HOST_TABLE, "its host tier, or 0"),
    "overlays overlays_at": "rows of deltas that lie over it: how many, and the addresses of their words",
    "default_at half_default_at": "the default row, as float32 and as float16",
    "dim code row_bytes": "of a row: its length, its dtype, its bytes as stored",
    "id": "its number among all tables",
    "base": (BASE, "or 0: its rows are not in sealed files here"),
    "changes patches patches_at": "`sealed_rows.SOME` or ALL: whether patches have all changed rows; how many, and the addresses of them",
    "own_at partitions": "which partitions are this node's, bool[partitions]; 0: it has every key",
    "colliding colliding_at": "how many hashes are shared by keys, and these",
})  # fmt: skip
VIEW = define("View", "one version with its deltas up to a sequence number", {
    "token": "stands for the version with one dense part",
    "seq": "the sequence number",
    "tables": (TABLE, "those of the version, in its order"),
})  # fmt: skip
SERVED = define("Served", "what a model serves; its address is 0 where it serves nothing", {
    "active canary": (VIEW, "of the active version and of the canary, or 0"),
    "share": "the canary's, of SHARE_UNIT",
    "labels": "a number for the labels that there are",
})  # fmt: skip
SHARE_UNIT = 1 << 32
CALL_FIELDS = {
    "table": "which of the view's",
    "keys_at keys_n": "where its keys are, from the request's data or the codes on, and how many",
    "kind": "ROWS, BAGS_OF_ROWS, FOUND_ALONE or CHECKED",
    "out_at out_code": "where in the answer its rows go; 0: float32, 1: float16",
    "found_at": "where in the answer it says which keys there are, or NOWHERE",
    "combiner": "of bags (`tiers/host/cache/pool.py`)",
    "starts_at bags bag_keys": "where the starts of bags are, or NOWHERE: each has so many keys; and how many bags",
    "weights_at": "where the weights are, or NOWHERE",
    "padded padding": "whether there is a padding key, and its code",
    "table_counts": "the row of counts of the table",
    "key_form": "AS_CODES, NO_NEGATIVE, STRINGS or HASHED",
    "pooled": "1, of bags: those have their answer of whose keys memory has all",
}
CALL = define("Call", "one look-up of a run", CALL_FIELDS)
RUN = define("Run", "one request, bound by a variant and its own sizes; its calls lie behind it", {
    "answer_bytes": "of the answer's data",
    "calls keys": "how many",
    "codes_at": "codes of keys that are strings or hashed",
    "scratch": "bytes of memory to work in",
    "work_bytes": "of rows, beside those of the answer",
    "window": "blocks that may be waited for at a time where memory lacks rows (`sealed_blocks.look_up`); 0: none",
})  # fmt: skip
PLANNED = define("PlannedCall", "a call of a variant, filled where all requests have the same", CALL_FIELDS | {
    "keys_of offsets_of weights_of": "which inputs of the request are its own, or NONE",
    "rows_to found_to": "which outputs are, or NONE",
    "hash": "NOT_HASHED, MOD_SIGNED, MOD_UNSIGNED or SEEDED: how codes become row numbers (`formats/key_hash.py`)",
    "mod bits": "how many row numbers there are, and what a code is xor before it is hashed",
})  # fmt: skip
PIECE = define("Piece", "a text of the answer", {
    "at bytes": "the text",
    "value": "which number of the values comes behind it, or NONE; in messages also how many pieces or outputs there are (`grpc_answer.py`)",
})  # fmt: skip
CHECK = define("Check", "what size an input of a prediction must have", {
    "input axis": "of which input, along which axis",
    "size": "a number, or that of a name, as ~name",
})  # fmt: skip
GRAPH_INPUT = define("GraphInput", "where an input of a graph comes from, and its shape", {
    "call": "the look-up that it has the rows of; OWN: it is a tensor of the request itself",
    "of lead": "the input of the request that has its first `lead` sizes",
    "width": "the size behind them, or 0",
    "flat": "by which the last of them is multiplied, or 0",
})  # fmt: skip
MOST_SCORE_RANK = 4
SCORE = define("Score", "an output of a graph", {
    "width": "bytes of an element",
    "rank": "how many sizes",
    "sizes": ((np.int64, (MOST_SCORE_RANK,)), "as in a check"),
})  # fmt: skip
SCORING = define("Scoring", "what predictions of a structure ask beyond their look-ups (`scoring.py`)", {
    "number": "of the graph",
    "checks": "how many", "first_check": (CHECK, "where they are"),
    "inputs": "how many", "first_input": (GRAPH_INPUT, "where they are"),
    "scores": "how many", "first_score": (SCORE, "where they are"),
    "half": "1: rows of some input come as half the bytes that count in the look-up's limit",
    "apart": "1: who runs the graph looks up too, as rows may lie on a device; the inputs are the request's own",
})  # fmt: skip
VARIANT = define("Variant", "how requests of a structure are answered under one version with one dense part", {
    "token": "of the views that it fits",
    "counts": "the row of counts of the version",
    "head_at head_bytes": "an answer's head that is ready, of refusals and of rows; or 0",
    "date_at": "where in it the date is; a header block of gRPC has none",
    "digits_at": "of rows for a front: where in it the digits of the length are",
    "table table_counts": "of rows for a front: which table, and the row of its counts",
    "framed": "1: each output of the answer has a tag and its length before its bytes (`grpc_answer.py`)",
    "planned_calls": "how many", "calls": (PLANNED, "where they are"),
    "outputs output_bytes": "how many, and of each the bytes of an element, a row or one `found`",
    "pieces": "how many", "texts": (PIECE, "where they are"),
    "alignment": "of outputs, a power of two",
    "scoring": (SCORING, "of predictions that are begun here, whose outputs are rows for the graph; or 0"),
})  # fmt: skip
PLAN = define("Plan", "how requests of one path and structure are answered", {
    "path_at path_bytes structure_at structure_bytes": "by which it is found",
    "form": "TENSORS: of requests over HTTP; STORED_ROWS: of a front, by its line; MESSAGE: of gRPC, by its model",
    "model": "the slot of the model",
    "rates_at": "the model's rates, or 0",
    "wanted": "ANY_VERSION: the active one or the canary as the share says; ONE_VERSION; STABLE; ONLY_CANARY; BY_LABEL",
    "labelled": "BY_LABEL: as long as these are the labels",
    "variant other_variant": (VARIANT, "for each of two versions that may be served, or 0"),
    "last_used": "when, on the monotonic clock in ns",
})  # fmt: skip
ENTRY = define(
    "PlanEntry",
    "an entry of the index of plans",
    {"hash": "of path, structure and form", "plan": (PLAN, "or 0: it is free")},
)
table_at, view_at, served_at, entry_at, plan_at, variant_at = map(at, (TABLE, VIEW, SERVED, ENTRY, PLAN, VARIANT))
planned_at, run_at, run_call_at, piece_at = map(at, (PLANNED, RUN, CALL, PIECE))
check_at, graph_input_at, score_at = map(at, (CHECK, GRAPH_INPUT, SCORE))
CALL_BYTES, RUN_BYTES = CALL.bytes, RUN.bytes

# values of a plan's `form` and `wanted`
TENSORS, STORED_ROWS, MESSAGE = range(3)
ANY_VERSION, ONE_VERSION, STABLE, ONLY_CANARY, BY_LABEL = range(5)
SETS, WAYS = 512, 8  # of the index of plans: sets, and plans in each


ROWS, BAGS_OF_ROWS, FOUND_ALONE, CHECKED = range(4)  # a call's `kind`; CHECKED: nothing is looked up
# values of `key_form`: codes as the table has them; the other integer type, in which a negative key is in no table or is another key; strings; hashed
AS_CODES, NO_NEGATIVE, STRINGS, HASHED = range(4)
NOT_HASHED, MOD_SIGNED, MOD_UNSIGNED, SEEDED = range(4)
NOWHERE = -1
