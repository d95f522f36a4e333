"""The host tier: hot rows in CPU memory. `table.py` is its form as a tier."""
