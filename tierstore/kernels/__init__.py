"""Numba kernels: arrays and scalars in, arrays out."""
