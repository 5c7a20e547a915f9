"""count_lookups(): the ids that tables read in a step: torch's tables, and the shards of TorchRec's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

from torch import Tensor, nn

from torchrec_ext.observe.counts import TableFacts
from torchrec_ext.observe.reached import every_module, named_modules


@contextmanager
def count_lookups(
    roots: Sequence[nn.Module],
) -> Iterator[dict[Any, tuple[TableFacts, nn.Module]]]:
    """Counts the ids that each table of this process reads meanwhile.

    Yields:
        Facts and module of each table that was read; a kernel of TorchRec is the module of several tables.
    """
    tables: dict[Any, tuple[TableFacts, nn.Module]] = {}
    modules = list(chain.from_iterable(map(every_module, roots)))
    paths = {id(module): path for path, module in named_modules(roots)}
    shardings: dict[str, str] = {}
    for module in modules:
        plan = getattr(module, "module_sharding_plan", None) or {}
        shardings |= {name: sharding.sharding_type for name, sharding in plan.items()}

    def add(key: Any, module: nn.Module, facts: TableFacts) -> None:
        before = tables[key][0].read if key in tables else 0
        tables[key] = replace(facts, read=before + facts.read), module

    def plain(module: Any, args: Any) -> None:
        if args and isinstance(args[0], Tensor):
            name = paths.get(id(module)) or type(module).__name__
            rows, dim = module.weight.shape
            add(
                id(module),
                module,
                TableFacts(name=name, rows=rows, dim=dim, read=args[0].numel()),
            )

    def sharded(module: Any, args: Any) -> None:
        counts = iter(args[0].length_per_key())
        for index, table in enumerate(module.config.embedding_tables):
            facts = TableFacts(
                name=table.name,
                rows=table.local_rows,
                dim=table.local_cols,
                read=sum(next(counts, 0) for _ in table.feature_names),
                sharding=shardings.get(table.name, ""),
            )
            add((id(module), index), module, facts)

    with ExitStack() as stack:
        # Two roots may hold one module, whose ids count once.
        for module in dict.fromkeys(modules):
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                stack.callback(module.register_forward_pre_hook(plain).remove)
            elif hasattr(getattr(module, "config", None), "embedding_tables"):
                stack.callback(module.register_forward_pre_hook(sharded).remove)
        yield tables
