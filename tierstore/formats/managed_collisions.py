"""Managed collisions of TorchRec, told by the names of their tensors. Pure functions.

Such a module stands before a table and turns ids into slots, which are the table's rows. MCH keeps ids in ascending
order in `_mch_sorted_raw_ids`, free places as INT64_MAX at the end, and the slot of each beside it in
`_mch_remapped_ids_mapping`; an id that it has not reads the last slot. Hash ZCH keeps in `_hash_zch_identities` the id
of each slot, and looks for an id at a few slots from its hash on.
"""

from __future__ import annotations

from collections.abc import Iterable

MCH_IDS, MCH_SLOTS, MCH_FREE = "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", (1 << 63) - 1
MCH, HASH_ZCH = "MCH", "hash ZCH"
HASH_ZCH_PREFIX = "_hash_zch_"


def kind_of(names: Iterable[str]) -> str | None:
    """`MCH`, `hash ZCH` or None: what a module or a state dict with tensors of these names has."""
    for name in names:
        last = name.rpartition(".")[2]
        if last in (MCH_IDS, MCH_SLOTS):
            return MCH
        if last.startswith(HASH_ZCH_PREFIX):
            return HASH_ZCH
    return None
