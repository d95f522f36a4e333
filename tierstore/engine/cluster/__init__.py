"""What nodes share of a model in a cluster: its versions, which one is current, its delta log, its lease."""
