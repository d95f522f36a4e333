"""Kernels for tests alone: parts of the package's kernels that Python cannot call otherwise. Compiled once, then kept beside them."""

from __future__ import annotations

from pathlib import Path

from tierstore.kernels import stamp_caches

stamp_caches(Path(__file__).parent)
