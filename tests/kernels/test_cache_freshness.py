"""Compiled kernels are never older than a helper that they inline."""

from __future__ import annotations

import os

from tierstore.kernels import share_one_mtime


def test_an_edit_to_one_kernel_source_makes_all_of_them_newer(tmp_path):
    for name, age in (("codec.py", 5), ("raw.py", 0), ("pool.py", 9)):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    share_one_mtime(tmp_path)
    assert {source.stat().st_mtime for source in tmp_path.iterdir()} == {1000}
