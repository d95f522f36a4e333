"""Where rows are: on this machine, in a cluster, on nodes upstream.

What the engine asks of them is in `placement.py`.
"""
