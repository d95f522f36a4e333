"""The shape of a sealed file's blocks. Separate from the files themselves, so that a sizing needs no kernel."""

from __future__ import annotations

PAGE = 4096
_LARGEST = 32 << 10  # unless a single row needs more


def block_shape(row_bytes: int) -> tuple[int, int]:
    """(bytes a block, rows a block): the fewest pages with at most an eighth unused, or else the pages with the least unused share."""
    record = row_bytes + 8
    smallest = -(-(record + 8) // PAGE) * PAGE
    sizes = range(smallest, max(smallest, _LARGEST) + 1, PAGE)
    used = {size: (size - 8) // record * record / size for size in sizes}
    size = next((size for size in sizes if used[size] >= 7 / 8), max(sizes, key=lambda size: used[size]))
    return size, (size - 8) // record
