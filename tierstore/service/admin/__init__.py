"""For operators and producers: the admin interface, metrics, the pages, deltas from a directory."""
