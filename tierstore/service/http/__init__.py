"""The HTTP transport: connections and their limits, and the protocols of the data plane over it."""
