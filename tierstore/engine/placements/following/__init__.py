"""Shared code for rows on other machines, in a cluster or upstream: following a pointer and a log, and reading rows."""
