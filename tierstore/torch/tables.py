"""The tables of a module: its embeddings, by name, and what their rows are. For the thread that trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from tierstore.arguments import check_name
from tierstore.errors import InvalidInput
from tierstore.formats.managed_collisions import kind_of

BATCH_ROWS = 1 << 16  # rows that are copied at a time
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # in paths; torch.compile's, activation checkpoints'


class Collection(NamedTuple):
    """A TorchRec collection in a module, told by what it has: TorchRec is not imported."""

    module: Any
    tables: list[
        tuple[Any, Any]
    ]  # a config (`name`, `feature_names`, perhaps `pooling`) with its nn.Embedding or nn.EmbeddingBag


def collections_of(module: nn.Module) -> list[Collection]:
    """Every EmbeddingBagCollection and EmbeddingCollection in a module, as one process has
    them before they are sharded.
    """
    found = []
    for part in module.modules():
        for configs, tables in (("embedding_bag_configs", "embedding_bags"), ("embedding_configs", "embeddings")):
            if callable(getattr(part, configs, None)) and isinstance(getattr(part, tables, None), nn.ModuleDict):
                of = getattr(part, tables)
                found.append(Collection(part, [(one, of[one.name]) for one in getattr(part, configs)()]))
    return found


def unwrapped(module: nn.Module) -> nn.Module:
    """The module within those of `torch.compile` and of data parallel training."""
    while True:
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module


def tables_of(module: nn.Module) -> dict[str, Any]:
    """The embeddings in a module by the names of their tables: their paths (`user.rows` is
    `user_rows`), or those of their configs.
    """
    module = unwrapped(module)
    configs = {id(table): config.name for one in collections_of(module) for config, table in one.tables}
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            own = "_".join(name for name in path.split(".") if name not in _WRAPPERS)
            name = check_name("table", configs.get(id(part), own or "embedding"))
            if name in found:
                raise InvalidInput(f"two tables of {type(module).__name__} are named {name!r}: rename one of them")
            found[name] = part
    if not found:
        raise InvalidInput(
            f"{type(module).__name__} has no nn.Embedding and no nn.EmbeddingBag: expected at least one"
            f"{_instead_of_tables(module)}"
        )
    return found


def _instead_of_tables(module: nn.Module) -> str:
    """What a module has that was a table once, to be said of one that has none."""
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            return "; it was made by torch.jit: give the module that it was made of"
        if hasattr(part, "num_embeddings") or hasattr(part, "embedding_bag_configs"):
            return (
                f"; {path or 'it'} is a {type(part).__module__}.{type(part).__qualname__}: give the module as it was "
                "before it was quantized or sharded"
            )
    return ""


def check_forward(name: str, table: Any) -> None:
    """InvalidInput for a table with a forward of its own, which does more than to look rows up."""
    plain = nn.Embedding if isinstance(table, nn.Embedding) else nn.EmbeddingBag
    own = {name for one in type(table).__mro__ if one not in plain.__mro__ for name in vars(one)}
    if {"forward", "__call__"} & {*vars(table), *own}:
        raise InvalidInput(
            f"table {name!r} is a {type(table).__qualname__}, whose forward is not that of nn.{plain.__name__}: rows "
            "would be served without what it does. Have the module around the table do that: to its rows after the "
            "look-up, to its keys before it (tierstore.torch.HashKeys, or the caller of forward)"
        )


def check_table(name: str, table: Any) -> None:
    """InvalidInput for a table that answers something else than the rows of a weight that one process has whole."""
    check_forward(name, table)
    weight = table.weight
    if weight.is_meta or hasattr(weight, "full_tensor") or weight.ndim != 2:
        raise InvalidInput(
            f"table {name!r}: expected a weight [rows, dim] that this process has whole, got {_kind(weight)}: load a "
            "state dict that was gathered into a module that is not sharded"
        )


def _kind(weight: Any) -> str:
    return f"{type(weight).__name__} {list(weight.shape)} on {weight.device}"


def managed_collisions_of(module: nn.Module) -> list[tuple[str, Any, str | None]]:
    """The modules of TorchRec that turn ids into slots: (name of the table, module, `MCH` or another kind)."""
    return [
        (path.rpartition(".")[2], part, kind_of(part._buffers))
        for path, part in module.named_modules()
        if kind_of(part._buffers) or any(one.__name__ == "ManagedCollisionModule" for one in type(part).__mro__)
    ]


def check_collections(module: nn.Module) -> None:
    """InvalidInput for collections that do something else than TorchRec's, or whose keys are slots of ids."""
    for table, part, _ in managed_collisions_of(module):
        raise InvalidInput(
            f"table {table!r} has managed collisions ({type(part).__name__}): it is looked up by slots, which pass "
            "from one id to another, and not by the ids of requests. Write it by raw id with `tierstore import`, as "
            "docs/migrate-torchrec.md has it, and its deltas with DeltaWriter"
        )
    for collection in collections_of(module):
        of = type(collection.module)
        if "forward" in vars(collection.module) or (
            any(one.__module__.startswith("torchrec.") for one in of.__mro__)
            and not next(one for one in of.__mro__ if "forward" in vars(one)).__module__.startswith("torchrec.")
        ):
            raise InvalidInput(
                f"{of.__qualname__} is a collection of TorchRec with a forward of its own: rows would be served "
                "without what it does. Have the module around it do that"
            )


def weight_rows(table: Any, rows: Any) -> torch.Tensor:
    """Rows of a table as a look-up gives them: shortened where it has a `max_norm`. rows: a slice, or int64[n]."""
    weight: torch.Tensor = table.weight.detach()[rows]
    if table.max_norm is None:
        return weight
    norms = torch.linalg.vector_norm(weight.float(), table.norm_type, dim=1, keepdim=True)
    shortened = weight * (table.max_norm / (norms + 1e-7)).to(weight.dtype)  # as PyTorch's own
    return torch.where(norms > table.max_norm, shortened, weight)


def padding_of(table: Any) -> int | None:
    """The row that never counts; a row of an nn.Embedding that is not zeros is read like any other."""
    padding: int | None = table.padding_idx
    if padding is None or isinstance(table, nn.EmbeddingBag) or table.weight.is_meta:
        return padding
    return None if table.weight[padding].detach().any() else padding


@contextmanager
def scoring(module: nn.Module) -> Iterator[None]:
    """In eval mode, without gradients and as Python runs it; each part's mode is afterwards what it was.

    What `torch.compile` has made before a hook was registered would not call it.
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for part, mode in modes:
            part.training = mode


def check_mode(of: str, mode: str | None) -> None:
    """InvalidInput for a way of pooling that is not served; None is none."""
    if mode not in (None, "sum", "mean"):
        raise InvalidInput(f"{of}: mode {mode!r} is not served: expected sum or mean")


def checked_keys(keys: Mapping[str, Any] | None, tables: Mapping[str, Any]) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for name, values in (keys or {}).items():
        if name not in tables:
            raise InvalidInput(f"keys: expected tables among {', '.join(tables)}, got {name!r}")
        arrays[name] = values.detach().cpu().numpy() if hasattr(values, "detach") else np.asarray(values)
        if arrays[name].shape != (len(tables[name].weight),):
            raise InvalidInput(
                f"keys of table {name!r}: expected one per row, {len(tables[name].weight)}, got "
                f"{list(arrays[name].shape)}"
            )
    return arrays
