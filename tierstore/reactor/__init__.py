"""The reactor, a compiled loop that owns connections (`loop.py`). Its Python side is `service/reactor/`."""
