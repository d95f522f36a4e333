"""The HTTP front: connections and their bounds, and the data plane in either protocol."""
