"""Rows on upstream nodes: a front reads what they report, follows one version of each model, and asks them for rows."""
