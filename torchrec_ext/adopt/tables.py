"""adopt_tables(): a user's nn.Embedding and nn.EmbeddingBag exchanged for TorchRec's collections, to be sharded.

Each module is exchanged in its place: the user's forward runs as it is and calls it with ids.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.adopt.checks import fault_of_module
from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.graph import bad_id
from torchrec_ext.observe.user_lines import user_line
from torchrec_ext.schema.validation import listed

_TABLES = (nn.Embedding, nn.EmbeddingBag)
_POOLING = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}


class ShardableTable(nn.Module):
    """Looks up one table by a collection of TorchRec's; made by :func:`adopt_tables`.

    The table shares the memory of the user's weight until :func:`hybrid_parallel` shards it, and each shard begins with
    this weight.

    Args:
        name: name of the table, and of its ids.
        weight: (rows, D).
        pooling: ``sum`` or ``mean`` of an nn.EmbeddingBag, "" of an nn.Embedding.
        padding: the id of an nn.Embedding whose row is not trained; None if there is none.
    """

    def __init__(
        self, name: str, weight: Any, pooling: str, padding: int | None
    ) -> None:
        super().__init__()
        self._name = name
        self.padding = padding
        self._rows = len(weight)
        self._is_bag = bool(pooling)
        rows, columns = weight.shape
        config: dict[str, Any] = {
            "num_embeddings": rows,
            "embedding_dim": columns,
            "name": name,
            "feature_names": [name],
            # A weight that has no memory is drawn as nn.Embedding draws it.
            "init_fn": nn.init.normal_,
        }
        # Without memory of its own: the user's weight takes its place below.
        meta = torch.device("meta")
        collection: Any
        if pooling:
            config["pooling"] = _POOLING[pooling]
            collection = EmbeddingBagCollection(
                [EmbeddingBagConfig(**config)], device=meta
            )
            collection.embedding_bags[name].weight = weight
        else:
            collection = EmbeddingCollection([EmbeddingConfig(**config)], device=meta)
            collection.embeddings[name].weight = weight
        self.collection = collection

    @property
    def weight(self) -> Tensor:
        """Refuses: a sharded table is whole on no rank."""
        raise CannotAdopt(
            f"{user_line()}: the weight of table '{self._name}' is read as a matrix, but a sharded table is whole on "
            "no rank: look its rows up, or name it in adopt_tables(without=)"
        )

    def forward(
        self,
        input: Tensor,  # noqa: A002 -- the name in nn.Embedding
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Looks up ids, (B, ...) or of a bag (B, L), and returns rows, (B, ..., D) or of a bag (B, D).

        Raises:
            CannotAdopt: ids of a bag are no (B, L), or have offsets or weights.
            IndexError: an id outside of the table.
        """
        found = self.collection(self._jagged(input, offsets, per_sample_weights))
        if self._is_bag:
            return found[self._name]  # type: ignore[no-any-return]
        rows = found[self._name].values().view(*input.shape, -1)
        if self.padding is not None:
            is_padding = (input == self.padding).unsqueeze(-1)
            rows = torch.where(is_padding, rows.detach(), rows)
        return rows  # type: ignore[no-any-return]

    def _jagged(
        self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> KeyedJaggedTensor:
        """Returns the ids, of which each row of a bag's is a bag."""
        if self._is_bag and (
            ids.dim() != 2 or offsets is not None or weights is not None
        ):
            raise CannotAdopt(
                f"{user_line()}: table '{self._name}' is looked up with offsets or per_sample_weights: give ids as "
                "(B, L), and weigh the rows of an nn.Embedding in forward"
            )
        # Refuse an id outside of the table, as nn.Embedding does; TorchRec's kernels read row 0 in its place.
        if ids.is_cuda:
            torch._assert_async(((ids >= 0) & (ids < self._rows)).all())
        elif bad := bad_id(ids, self._rows, self._name):
            raise IndexError(bad)
        bags, length = ids.shape if self._is_bag else (ids.numel(), 1)
        lengths = torch.full((bags,), length, dtype=torch.int64, device=ids.device)
        # TorchRec's kernels read ids as they lie in memory: a column of a matrix is copied.
        flat = ids.flatten().contiguous()
        return KeyedJaggedTensor([self._name], flat, lengths=lengths)


def adopt_tables(model: nn.Module, *, without: Collection[str] = ()) -> nn.Module:
    """Exchanges a user's tables for TorchRec's collections in place, for tables that one machine cannot hold.

    :func:`hybrid_parallel` then shards the tables over the ranks, replicates everything else, and gives every shard the
    user's weights. Where they are on the meta device, tables are drawn as nn.Embedding draws them.

    Args:
        model: the user's model, with the same weights on all ranks, or on the meta device; its tables are exchanged.
        without: paths of tables that stay as they are, such as of positions, whose weight is read as a matrix.

    Returns:
        The model, or the exchanged table if the model is one.

    Raises:
        CannotAdopt: a table does what no collection does; the message names it and the remedy.
        ValueError: ``without`` names no table.

    Example:
        >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 1))
        >>> ids = torch.tensor([[1, 2], [3, 4]])
        >>> before = model(ids)
        >>> adopt_tables(model) is model, torch.equal(model(ids), before), type(model[0]).__name__
        (True, True, 'ShardableTable')
    """
    # Each path: a table that two modules share has two.
    paths = dict(model.named_modules(remove_duplicate=False))
    # A collection has its tables as modules of torch's.
    collections = tuple(
        f"{path}." if path else ""
        for path, module in paths.items()
        if isinstance(module, EmbeddingCollection | EmbeddingBagCollection)
    )
    modules = {
        path: module
        for path, module in paths.items()
        if isinstance(module, _TABLES) and not path.startswith(collections)
    }
    for path in without:
        if path not in modules:
            raise ValueError(
                f"adopt_tables(without={path!r}): no such table; there are {listed(sorted(modules))}"
            )
        del modules[path]
    if not modules:
        raise CannotAdopt(
            f"{type(model).__name__} has no nn.Embedding and no nn.EmbeddingBag to move"
        )
    exchanged: dict[nn.Module, ShardableTable] = {}
    owners: dict[int, nn.Module] = {}
    for path, table in modules.items():
        _refuse_table(path, table)
        if owners.setdefault(id(table.weight), table) is not table:
            raise CannotAdopt(
                f"table '{path}' shares its weight with another: look both up by one module"
            )
    for path, table in modules.items():
        if table not in exchanged:
            name = path.replace(".", "_") or "table"
            # "a.b" and "a_b" would be one name, and some are methods of ModuleDict.
            names = [each._name for each in exchanged.values()]
            while name in names or hasattr(nn.ModuleDict, name):
                name += "_table"
            pooling = getattr(table, "mode", "")
            made = ShardableTable(name, table.weight, pooling, table.padding_idx)
            exchanged[table] = made.train(table.training)
        if not path:
            return exchanged[table]
        model.set_submodule(path, exchanged[table])
    return model


def _refuse_table(path: str, table: nn.Embedding | nn.EmbeddingBag) -> None:
    # As adopt() refuses it.
    fault = fault_of_module(table)
    if isinstance(table, nn.EmbeddingBag) and table.padding_idx is not None:
        fault = f"has padding_idx={table.padding_idx}; take nn.Embedding, and pool its rows in forward"
    elif not table.weight.requires_grad:
        fault = "has a frozen weight; make it a buffer of a module of your own"
    elif table.weight.dtype != torch.float32:
        fault = f"has a {table.weight.dtype} weight; call float() first"
    elif type(table).forward not in (nn.Embedding.forward, nn.EmbeddingBag.forward):
        fault = "has a forward of its own; put what it does beside the look-up into another module"
    elif table._forward_hooks or table._forward_pre_hooks:
        fault = "has hooks; put them on another module"
    if fault:
        raise CannotAdopt(f"table '{path}' {fault}")
