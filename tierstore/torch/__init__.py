"""For PyTorch: snapshots of a module's embeddings with its dense part, deltas of the rows that training
touched, modules that read a store.

    from tierstore.torch import TouchedRows, write_delta, write_snapshot

    touched = TouchedRows(net)
    train(net)
    write_snapshot("snapshots/1", net, inputs, model="ctr", version=1)
    train(net)
    write_delta("deltas/1.arrow", touched, model="ctr", seq=1)

Every `nn.Embedding` and `nn.EmbeddingBag` in the module becomes a table with its name (`user.rows` as `user_rows`). The
key of a row is its number unless `keys` says otherwise. Every argument of `forward` that goes into a table, straight or
through a `HashKeys`, becomes a feature with the argument's name. Needs PyTorch, which is not a dependency of this
package, and for the dense part `onnxscript` and the extra `dense`. Use it from the thread that trains.

To score with PyTorch itself beside a store or a service, `swap_embeddings` puts modules that read it
in place of a module's tables.
"""

from __future__ import annotations

from tierstore.torch.export import export_dense, write_snapshot
from tierstore.torch.hashing import HashKeys
from tierstore.torch.incremental import add_incremental_dump
from tierstore.torch.modules import Embedding, EmbeddingBag, EmbeddingBagCollection, PooledRows, swap_embeddings
from tierstore.torch.sharded import Published, ShardedPublisher
from tierstore.torch.touched import Behind, TouchedRows, write_delta

__all__ = [
    "Behind",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "HashKeys",
    "PooledRows",
    "Published",
    "ShardedPublisher",
    "TouchedRows",
    "add_incremental_dump",
    "export_dense",
    "swap_embeddings",
    "write_delta",
    "write_snapshot",
]
