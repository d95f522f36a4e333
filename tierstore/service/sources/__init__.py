"""Where changes come from without a request: each source is a thread of its own that
applies what it reads to the store.
"""

from __future__ import annotations
