"""The placements of rows: this machine, a cluster, nodes upstream. Their protocol is in `placement.py`."""
