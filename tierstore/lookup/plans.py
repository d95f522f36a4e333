"""The record layouts of plans: what a model serves, its views and tables, and how requests of a structure are answered.

Python makes the records (`engine/serving/served.py`, `service/reactor/plan_index.py`); `by_plan.py`, `binding.py` and `scoring.py` read them. A token
stands for one version with one dense part: a variant fits a view if their tokens are equal.
"""

from __future__ import annotations

import numpy as np

from tierstore.kernels.records import at, define
from tierstore.tiers.disk.layout import BASE
from tierstore.tiers.host.cache.lookup import HOST_TABLE

TABLE = define("Table", "a table as one view reads it", {
    "host": (HOST_TABLE, "the table's host tier, or 0"),
    "overlays overlays_at": "the number of overlays with rows of the table, and the address of their addresses",
    "default_at half_default_at": "the addresses of the default row as float32 and as float16",
    "dim code row_bytes": "the length of a row, its dtype, and its bytes as stored",
    "id": "the table's number among all tables",
    "base": (BASE, "the sealed files with the table's rows; 0: it has none here"),
    "changes patches patches_at": "SOME or ALL (`sealed_rows.py`): whether the patches have all changed rows; the number of patches, and the address of their addresses",
    "own_at partitions": "the address of bool[partitions], true for the partitions of this node; 0: the node has every key",
    "colliding colliding_at": "the number of hashes that several keys share, and the address of these hashes",
})  # fmt: skip
VIEW = define("View", "a version with its deltas up to a sequence number", {
    "token": "a number for the version with one dense part",
    "seq": "the sequence number",
    "tables": (TABLE, "the tables of the version, in its order"),
})  # fmt: skip
SERVED = define("Served", "the views that a model serves; the address is 0 while it serves nothing", {
    "active canary": (VIEW, "the views of the active version and of the canary, or 0"),
    "share": "the canary's share of the requests, in SHARE_UNIT",
    "labels": "a number that stands for the present labels",
})  # fmt: skip
SHARE_UNIT = 1 << 32
CALL_FIELDS = {
    "table": "the number of the table in the view",
    "keys_at keys_n": "the offset of the keys in the request's data, or among the codes, and their number",
    "kind": "ROWS, BAGS_OF_ROWS, FOUND_ALONE or CHECKED",
    "out_at out_code": "the offset of the rows in the answer, and their dtype. 0: float32, 1: float16",
    "found_at": "the offset of the found marks in the answer, or NOWHERE",
    "combiner": "the combiner of bags (`tiers/host/cache/pool.py`)",
    "starts_at bags bag_keys": "the offset of the starts of bags; NOWHERE: each bag has `bag_keys` keys. The number of bags",
    "weights_at": "the offset of the weights, or NOWHERE",
    "padded padding": "1 if there is a padding key, and the code of that key",
    "table_counts": "the number of the table's row of counts",
    "key_form": "AS_CODES, NO_NEGATIVE, STRINGS or HASHED",
    "pooled": "1: bags whose keys are all in memory are answered already",
}
CALL = define("Call", "one look-up of a run", CALL_FIELDS)
RUN = define("Run", "one request with its sizes, made from a variant; its calls follow the record in memory", {
    "answer_bytes": "the bytes of the answer's data",
    "calls keys": "the number of calls, and of keys in all of them",
    "codes_at": "the address of the codes of keys that are strings or are hashed",
    "scratch": "the bytes of working memory that the run needs",
    "work_bytes": "the bytes of rows beside those of the answer",
    "window": "the number of blocks that may be waited for at a time, where rows are not in memory (`sealed_blocks.look_up`); 0: none",
})  # fmt: skip
PLANNED = define("PlannedCall", "a call of a variant; fields that are equal for all requests are filled in", CALL_FIELDS | {
    "keys_of offsets_of weights_of": "the numbers of the inputs with the call's keys, offsets and weights, or NONE",
    "rows_to found_to": "the numbers of the outputs for its rows and its found marks, or NONE",
    "hash": "NOT_HASHED, MOD_SIGNED, MOD_UNSIGNED or SEEDED: how codes become row numbers (`formats/key_hash.py`); or AS_TRAINED",
    "mod bits": "the number of row numbers, and the bits that a code is xored with before it is hashed; AS_TRAINED: a TRAINER_HASH, and the address of `make_rows`",
})  # fmt: skip
MOST_SCORE_RANK = 4
PIECE = define("Piece", "a fixed text of an answer", {
    "at bytes": "the address and the bytes of the text",
    "value": "the place among the values of the number that follows the text, or NONE; in messages also a count of pieces or outputs (`grpc_answer.py`)",
    "datatype": "of a piece that the elements of output `value` follow, in JSON: their datatype, as a record has it; else 0",
    "rank": "of such a piece in lists as the output is shaped, and in a PredictResponse: the number of the output's sizes",
    "sizes": ((np.int64, (MOST_SCORE_RANK,)), "these sizes; ~n: the number at place n among the values"),
})  # fmt: skip
CHECK = define("Check", "the size that an input of a prediction must have along one axis", {
    "input axis": "the number of the input, and the axis",
    "size": "the size; ~n: that of the name with number n",
})  # fmt: skip
GRAPH_INPUT = define("GraphInput", "an input of a graph: its source and its shape", {
    "call": "the number of the look-up whose rows are the input; OWN: the input is a tensor of the request",
    "of lead": "the number of the request's input that has its first `lead` sizes",
    "width": "the size after these, or 0",
    "flat": "the factor by which the last of these is multiplied, or 0",
})  # fmt: skip
SCORE = define("Score", "an output of a graph", {
    "width": "the bytes of an element",
    "rank": "the number of sizes",
    "sizes": ((np.int64, (MOST_SCORE_RANK,)), "the sizes, as those of a check"),
})  # fmt: skip
HEAD_FIELDS = {
    "head_at head_bytes": "the head of an answer, ready to be copied",
    "date_at": "the offset of the date in that head; a header block of gRPC has no date",
}
SCORING = define("Scoring", "the part of a prediction's plan that goes beyond look-ups (`scoring.py`), with the head of a refusal", HEAD_FIELDS | {
    "number": "the number of the graph; 0: reactors can only refuse predictions, and the fields after it are not used",
    "checks": "the number of checks", "first_check": (CHECK, "the first of them"),
    "inputs": "the number of the graph's inputs", "first_input": (GRAPH_INPUT, "the first of them"),
    "scores": "the number of the graph's outputs", "first_score": (SCORE, "the first of them"),
    "half": "1: rows of an input take half of the bytes that count in the look-up's limit",
    "apart": "1: the thread that runs the graph looks up too, because rows may lie on a device; the inputs are those of the request",
})  # fmt: skip
VARIANT_FIELDS = {
    "token": "the token of the views that it fits",
    "counts": "the number of the version's row of counts",
}
VARIANT = define(
    "Variant",
    "the way to answer requests of one structure under one version with one dense part: a Lookup or FrontRows, whose first fields are these",
    VARIANT_FIELDS,
)
FRONT_ROWS = define("FrontRows", "a variant of rows for a front (`front_rows.py`)", VARIANT_FIELDS | HEAD_FIELDS | {
    "digits_at": "the offset in the head of the digits of the length",
    "table table_counts": "the number of the table, and that of its row of counts",
})  # fmt: skip
LOOKUP = define("Lookup", "a variant of look-ups (`binding.py`), and of predictions", VARIANT_FIELDS | {
    "framed": "UNFRAMED; FRAMED, TENSORS_FRAMED: each output of the answer follows its tag and its length, or its name and shape (`grpc_answer.py`)",
    "as_json": "0; FLAT, NESTED, BY_ROW: the elements of all outputs are in the answer's JSON, in one of three forms (`json_answer.py`)",
    "datatypes": "the address of the number of each input's datatype, where requests do not say it; or 0",
    "planned_calls": "the number of calls", "calls": (PLANNED, "the first of them"),
    "outputs output_bytes": "the number of outputs, and the address of each one's bytes: of an element, of a row, or of one `found`",
    "pieces": "the number of pieces", "texts": (PIECE, "the first of them"),
    "alignment": "the alignment of outputs, a power of two",
    "scoring": (SCORING, "of predictions, for whose graph the outputs are rows; 0: the outputs are the answer"),
})  # fmt: skip
PLAN = define("Plan", "the way to answer requests of one path and structure", {
    "path_at path_bytes structure_at structure_bytes": "the path and the structure, by which the plan is found",
    "form": "TENSORS: requests over HTTP; STORED_ROWS: requests of a front, by their line; MESSAGE, PREDICT_MESSAGE: requests of gRPC, by their model",
    "model": "the slot of the model",
    "rates_at": "the address of the model's rates, or 0",
    "wanted": "ANY_VERSION: the active version or the canary, by its share; ONE_VERSION; STABLE; ONLY_CANARY; BY_LABEL",
    "labelled": "the number of the labels for which a plan BY_LABEL is valid",
    "variant other_variant": (VARIANT, "the variants for up to two versions that are served, or 0"),
    "last_used": "the time of the last use, on the monotonic clock in ns",
})  # fmt: skip
ENTRY = define(
    "PlanEntry",
    "an entry of the index of plans",
    {"hash": "the hash of path, structure and form", "plan": (PLAN, "the plan; 0: the entry is free")},
)
table_at, view_at, served_at, entry_at, plan_at = map(at, (TABLE, VIEW, SERVED, ENTRY, PLAN))
lookup_at, front_rows_at = at(LOOKUP), at(FRONT_ROWS)
planned_at, run_at, run_call_at, piece_at = map(at, (PLANNED, RUN, CALL, PIECE))
check_at, graph_input_at, score_at = map(at, (CHECK, GRAPH_INPUT, SCORE))
CALL_BYTES, RUN_BYTES = CALL.bytes, RUN.bytes

# values of a plan's `form` and `wanted`
TENSORS, STORED_ROWS, MESSAGE, PREDICT_MESSAGE = range(4)
ANY_VERSION, ONE_VERSION, STABLE, ONLY_CANARY, BY_LABEL = range(5)
UNFRAMED, FRAMED, TENSORS_FRAMED = range(3)  # values of a variant's `framed`
FLAT, NESTED, BY_ROW = range(1, 4)  # values of its `as_json`
SETS, WAYS = 512, 8  # of the index of plans: sets, and plans in each


ROWS, BAGS_OF_ROWS, FOUND_ALONE, CHECKED = range(4)  # a call's `kind`; CHECKED: nothing is looked up
# values of `key_form`: codes as the table has them; the other integer type, in which a negative key is in no table or is another key; strings; hashed
AS_CODES, NO_NEGATIVE, STRINGS, HASHED = range(4)
NOT_HASHED, MOD_SIGNED, MOD_UNSIGNED, SEEDED, AS_TRAINED = range(5)
NOWHERE = -1
