"""What an operator and a producer use: the admin interface, metrics, the status page, deltas from a directory."""
