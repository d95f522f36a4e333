"""Imports: files and data frames of other tools, and HugeCTR/HPS models, written as snapshots.

Readers in front of the writer in `formats/`. One thread at a time; memory is bounded by batches where the source allows
it. A failed import writes no snapshot.
"""
