"""The Python side of the reactors: their threads and memory, and the plans by which they answer."""
