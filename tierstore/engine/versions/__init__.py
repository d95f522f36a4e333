"""One version of a model: its record, its open files and caches, and the dense parts and hot keys on disk."""
