"""The device tier: hot rows in GPU memory. `table.py` has the tier itself, `cupy_device.py` is the only user of CuPy."""
