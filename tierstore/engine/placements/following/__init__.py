"""What rows on other machines have in common, in a cluster or upstream: a pointer and a log that are
followed, and rows that are read.
"""
