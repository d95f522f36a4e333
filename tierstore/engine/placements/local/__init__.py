"""Rows on this machine: files of its disk, the pointer CURRENT, a log of its own."""
