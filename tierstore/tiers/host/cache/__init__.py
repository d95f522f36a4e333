"""Kernels of the host tier's set-associative cache: `layout.py` says how it lies in memory."""
