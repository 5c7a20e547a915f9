"""refusal(): why there is no plan, and what would make one, in numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from tabulate import tabulate
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType

from torchrec_ext.distributed.choices import Choice
from torchrec_ext.distributed.explain import size_text, table_bytes


def refusal(
    reason: str,
    tables: Sequence[BaseEmbeddingConfig],
    sharding: Mapping[str, str],
    world_size: int,
    usable: int,
    choices: Mapping[str, Choice],
) -> str:
    """Why no plan fits and what would make it fit.

    Args:
        reason: what the planner said.
        tables: all tables of the model.
        sharding: the sharding type asked for, by table.
        world_size: R.
        usable: bytes per rank that tables and their state may take.
        choices: the optimizer of each table, whose state takes memory too.
    """
    need = _need(tables, sharding, choices)
    sizes = {table.name: table_bytes(table) + choices[table.name].state_bytes(table) for table in tables}
    largest = max(sizes, key=lambda name: sizes[name])
    rows = [[t.name, f"{t.num_embeddings:,}", t.embedding_dim, sharding[t.name], size_text(sizes[t.name])] for t in tables]
    return "\n".join(
        [
            f"no sharding plan fits: tables with optimizer state need {size_text(need.spread)} over all ranks and "
            f"{size_text(need.on_each)} on each; {world_size} rank(s) have {size_text(usable)} for them each, "
            f"{size_text(world_size * usable)} together; the largest table, '{largest}', needs {size_text(sizes[largest])}",
            tabulate(rows, headers=["table", "rows", "dim", "sharding asked for", "with state"], disable_numparse=True),
            f"what would make it fit: {_remedy(need, world_size, usable)}",
            _changes(tables, sharding, choices, usable),
            f"TorchRec's planner said: {reason.splitlines()[0]}",
        ]
    )


class _Need(NamedTuple):
    """Bytes of tables and their state: divided over all ranks, and on each of them."""

    spread: int
    on_each: int

    def ranks(self, usable: int) -> int | None:
        """How many ranks of ``usable`` bytes take it; None where no number does."""
        return None if self.on_each >= usable else max(1, -(-self.spread // (usable - self.on_each)))


def _need(tables: Sequence[BaseEmbeddingConfig], sharding: Mapping[str, str], choices: Mapping[str, Choice]) -> _Need:
    sizes = {table.name: table_bytes(table) + choices[table.name].state_bytes(table) for table in tables}
    on_each = sum(size for name, size in sizes.items() if sharding[name] == "data_parallel")
    return _Need(sum(sizes.values()) - on_each, on_each)


def _remedy(need: _Need, world_size: int, usable: int) -> str:
    each = size_text(need.on_each + -(-need.spread // world_size))
    others = (
        f"{each} for them on each rank, with a larger plan.memory_gb where the device has it; fewer columns, or fewer rows: ids "
        "that leave gaps, such as hashes, are mapped to rows by rec.data.preprocess (Categorify or HashBucket)"
    )
    ranks = need.ranks(usable)
    if ranks is None:
        return f"shard the data_parallel tables, which no number of ranks makes smaller; {others}"
    return f"at least {ranks} ranks of this size, with row_wise for a table larger than one; {others}"


def _changes(tables: Sequence[BaseEmbeddingConfig], sharding: Mapping[str, str], choices: Mapping[str, Choice], usable: int) -> str:
    """What other optimizers and half precision would need, in the same numbers."""
    half = [t if sharding[t.name] == "data_parallel" else dataclasses.replace(t, data_type=DataType.FP16) for t in tables]
    precisions = {"": tables, "fp16 tables": half} if half != list(tables) else {"": tables}
    kinds: dict[str, Mapping[str, Choice]] = {"": choices}
    for kind in ("row_wise_adagrad", "sgd"):
        changed = {name: dataclasses.replace(choice, kind=kind) for name, choice in choices.items()}
        if changed != choices:
            kinds[kind] = changed
    rows = []
    for (kind, changed), (precision, configs) in product(kinds.items(), precisions.items()):
        need = _need(configs, sharding, changed)
        what = ", ".join(filter(None, [kind, precision])) or "as asked"
        rows.append([what, size_text(need.spread), size_text(need.on_each), need.ranks(usable) or "never"])
    headers = ["tables and their state", "over all ranks", "on each", "ranks of this size"]
    return str(tabulate(rows, headers=headers, disable_numparse=True))
