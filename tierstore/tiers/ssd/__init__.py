"""The cache on the local SSD for rows of other machines: its file, its tables, and the thread that fills it."""
