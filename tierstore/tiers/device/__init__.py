"""The device tier: hot rows in GPU memory. `cache.py` is its form as a tier, `cupy_device.py` the only user of CuPy."""
