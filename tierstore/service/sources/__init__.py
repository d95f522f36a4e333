"""Sources of changes other than requests: each is a thread of its own that applies what it reads to the store."""

from __future__ import annotations
