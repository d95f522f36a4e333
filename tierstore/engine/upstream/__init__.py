"""A node in front of other nodes: it reads what they report, follows one version of each model, and asks them for rows."""
