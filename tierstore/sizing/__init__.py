"""Sizing: how much memory, disk and network a table needs, and how often memory answers.

Pure Python; nothing is opened.
"""
