"""From what people have to a snapshot: files and frames of other tools, HugeCTR/HPS models.

Readers over the one writer of `formats/`. One thread at a time; memory is bounded by batches wherever the source
allows. An import that fails leaves no snapshot.
"""
