"""Rows on nodes upstream: a node in front of them reads what they report, follows one version of each
model, and asks them for rows.
"""
