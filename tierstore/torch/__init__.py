"""From PyTorch: snapshots of a module's embeddings with its dense part, and deltas of the rows that training touched.

    from tierstore.torch import TouchedRows, write_delta, write_snapshot

    touched = TouchedRows(net)
    train(net)
    write_snapshot("snapshots/1", net, inputs, model="ctr", version=1)
    train(net)
    write_delta("deltas/1.arrow", touched, model="ctr", seq=1)

Every `nn.Embedding` and `nn.EmbeddingBag` in the module becomes a table with its name (`user.rows` as `user_rows`). The key of
a row is its number unless `keys` says otherwise. Every argument of `forward` that goes straight into a table becomes a
feature with the argument's name. Needs PyTorch, which is not a dependency of this package, and for the dense part
`onnxscript` and the extra `dense`. Use it from the thread that trains.
"""

from __future__ import annotations

from tierstore.torch.export import export_dense, write_snapshot
from tierstore.torch.touched import Behind, TouchedRows, write_delta

__all__ = ["Behind", "TouchedRows", "export_dense", "write_delta", "write_snapshot"]
