"""One version of a model: its record, its open files and caches, the dense part and the hot keys it keeps on disk."""
