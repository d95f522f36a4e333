"""A table's names in the cluster, and the bytes of requests for its rows. Immutable; any thread may call it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tierstore.kernels.codec import address_of
from tierstore.tiers.cluster.commands import command
from tierstore.tiers.cluster.redis_keys import APPLYING, SEQ, rows_key, slot_of, watermark_key
from tierstore.types import Keys
from tierstore.wire import resp

MOST_FIELDS = 2048  # of a command: a server answers nobody else meanwhile


class TableLayout:
    """A table's names in the cluster, and its requests. Immutable."""

    def __init__(
        self, model: str, version: int, table: str, tags: Sequence[bytes], row_bytes: int, line: int = 0
    ) -> None:
        if not 1 <= row_bytes <= resp.MOST_ROW_BYTES:
            raise ValueError(f"expected rows of 1 to {resp.MOST_ROW_BYTES} bytes, got {row_bytes}")
        self.model, self.version, self.table, self.tags, self.row_bytes = model, version, table, tuple(tags), row_bytes
        self.slots = [slot_of(tag) for tag in tags]
        self.watermark_keys = [watermark_key(tag, model, version, line) for tag in tags]
        self.rows_keys = [rows_key(tag, model, version, table) for tag in tags]
        head = b"$%d\r\n" % row_bytes
        self.head, self.head_bytes = int.from_bytes(head, "little"), len(head)
        self.element_bytes = len(head) + row_bytes + 2
        self._marks = [command(b"HMGET", key, SEQ, APPLYING) for key in self.watermark_keys]
        self._rows = [b"$5\r\nHMGET\r\n$%d\r\n%s\r\n" % (len(key), key) for key in self.rows_keys]

    def __str__(self) -> str:
        return f"table {self.table} of {self.model}, version {self.version},"

    def request(
        self,
        pieces: Sequence[int],
        tags: Keys,
        codes: Keys,
        order: Keys,
        starts: Keys,
        commands: list[tuple[int, int, int, int]],
    ) -> npt.NDArray[np.uint8]:
        """The bytes of a request over one connection for these pieces, of the tags `tags[piece]`; appends its commands to `commands`.

        The watermark of a piece's tag is read before its rows and after them.
        """
        parts: list[bytes | tuple[int, int]] = []
        for piece in pieces:
            tag = tags[piece]
            commands.append((resp.MARK, piece, 0, 2))
            parts.append(self._marks[tag])
            for start in range(starts[piece], starts[piece + 1], MOST_FIELDS):
                stop = min(start + MOST_FIELDS, int(starts[piece + 1]))
                commands.append((resp.ROWS, piece, start, stop - start))
                parts += [b"*%d\r\n" % (stop - start + 2), self._rows[tag], (start, stop)]
            commands.append((resp.MARK, piece, 1, 2))
            parts.append(self._marks[tag])
        sizes = [len(part) if isinstance(part, bytes) else resp.KEY_BYTES * (part[1] - part[0]) for part in parts]
        out = np.empty(sum(sizes), np.uint8)
        view, base, at = out.data, address_of(out), 0
        for part, size in zip(parts, sizes, strict=True):
            if isinstance(part, bytes):
                view[at : at + size] = part
            else:
                resp.encode_keys(codes, order[part[0] : part[1]], base + at)
            at += size
        return out
