"""Rows on this machine: files of its disk, a document that says which version serves, a log of its own."""
