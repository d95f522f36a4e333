"""Kernels of the host tier's set-associative cache: `layout.py` describes its memory."""
