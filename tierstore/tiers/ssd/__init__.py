"""A cache on the local SSD for rows that are on other machines: its file, the tables in it,
and the thread that fills it.
"""
