"""The host tier: hot rows in CPU memory. `table.py` has the tier itself."""
