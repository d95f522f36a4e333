"""Bulk load: from a snapshot to sorted SST files, in helper processes."""
