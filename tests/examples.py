"""A small two-tower model and batches for it, for tests that do not care which."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torchrec import EmbeddingBagConfig, PoolingType

from torchrec_ext.batch import TowerBatch, pack
from torchrec_ext.distributed.tables import initialise_tables
from torchrec_ext.models.tower_model import Interaction, TowerModel, two_tower
from torchrec_ext.schema import BatchSchema, Jagged

USERS, ITEMS, DIM = 101, 50, 16
META = torch.device("meta")
Module = TypeVar("Module", bound=torch.nn.Module)


def table(name: str, rows: int, **options: object) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name,
        feature_names=[name],
        num_embeddings=rows,
        embedding_dim=DIM,
        **options,
    )  # type: ignore[arg-type]


def small_model(
    device: torch.device | None = None,
    interaction: Interaction = "top_nn",
    seed: int = 0,
) -> TowerModel:
    model = two_tower(
        [table("user_id", USERS), table("history", ITEMS, pooling=PoolingType.MEAN)],
        [table("item_id", ITEMS)],
        user_dense=["age"],
        item_dense=["price"],
        tower_widths=(16, 8),
        interaction=interaction,
        device=device,
    )
    return redrawn(model, seed)


def redrawn(model: Module, seed: int = 0, tables: int | None = None) -> Module:
    """Redraws the dense layers of ``model`` from the seed alone; tables off the meta device draw numbers before them.

    With ``tables`` also these are drawn anew, by a seed of their own.
    """
    torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.reset_parameters()
    if tables is not None:
        initialise_tables(model, seed=tables)
    return model


def gradients(model: TowerModel, batch: TowerBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits, and the gradient of every parameter that gets one."""
    loss, output = model(batch)
    loss.backward()
    return output.logits, {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def assert_every_gradient(model: torch.nn.Module, batch: TowerBatch) -> None:
    """Every parameter of ``model`` receives a gradient that is not 0."""
    model(batch)[0].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def by_table(state: dict[str, Any]) -> dict[str, Any]:
    """Weights or gradients with a table's name for a table's: its path depends on who looks it up."""
    return {
        name.split(".")[-2] if "embedding_bags." in name else name: value
        for name, value in state.items()
    }


def batches(
    count: int, size: int = 24, *, rank: int = 0, world_size: int = 1, seed: int = 0
) -> Iterator[TowerBatch]:
    """Yields this rank's share of ``count`` batches of ``size`` rows; their union over ranks is the same for any R."""
    schema = small_model(META).schema()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        users = torch.randint(USERS, (size,), generator=generator)
        items = torch.randint(ITEMS, (size,), generator=generator)
        lengths = torch.randint(0, 4, (size,), generator=generator)
        history = torch.randint(ITEMS, (int(lengths.sum()),), generator=generator)
        dense = torch.rand(2, size, generator=generator)
        labels = torch.randint(2, (size,), generator=generator).float()
        weights = torch.rand(size, generator=generator) + 0.5
        local = slice(rank * size // world_size, (rank + 1) * size // world_size)
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        yield schema.assemble(
            {
                "user_id": Jagged(users[local]),
                "history": Jagged(
                    history[ends[local.start] : ends[local.stop]], lengths[local]
                ),
                "item_id": Jagged(items[local]),
            },
            {"age": dense[0, local], "price": dense[1, local]},
            labels=labels[local],
            weights=weights[local],
            total_weight=float(weights.sum()) / world_size,
        )


def with_shared_rows(
    schema: BatchSchema,
    bags: Mapping[str, Jagged],
    dense: Mapping[str, Tensor],
    labels: Tensor,
    total_weight: float,
    queries: int,
    index: Tensor,
) -> TowerBatch:
    """The batch of B rows of which each reads one of Q shared rows, as loaders make them."""
    own, shared = (
        torch.stack([dense[name] for name in names], 1)
        if names
        else torch.empty(rows, 0)
        for names, rows in (
            (schema.row_dense, len(labels)),
            (schema.shared_dense, queries),
        )
    )
    return pack(
        schema.layout,
        bags,
        dense=own,
        labels=labels,
        weights=torch.ones_like(labels),
        total_weight=torch.tensor(total_weight),
        shared_dense=shared,
        index=index,
    )


def pair_batches(
    schema: BatchSchema,
    count: int,
    ids: Mapping[str, tuple[int, int]],
    *,
    of_query: Collection[str],
    queries: int,
    width: int,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[TowerBatch]:
    """Yields this rank's share of batches of Q queries beside W candidates each.

    ``ids`` has for each feature the number below which its ids are, and how many a row has. Columns ``of_query`` are
    equal in all rows of a query, or stand in it once if the schema shares them.
    """
    draw = torch.Generator().manual_seed(5)
    local = slice(rank * queries // world_size, (rank + 1) * queries // world_size)

    def rows(name: str, make: Callable[..., Tensor], *shape: int) -> Tensor:
        if name not in of_query:
            values = make((queries, width, *shape), generator=draw)
            return values[local].flatten(0, 1)
        values = make((queries, *shape), generator=draw)[local]
        return values if schema.shared else values.repeat_interleave(width, 0)

    index = torch.arange(local.stop - local.start).repeat_interleave(width)
    for _ in range(count):
        features = {}
        for name, (high, length) in ids.items():
            values = rows(name, partial(torch.randint, high), length)
            lengths = torch.full((len(values),), length)
            features[name] = Jagged(values.flatten(), lengths)
        dense = {name: rows(name, torch.rand) for name in schema.dense}
        labels = rows("label", partial(torch.randint, 2)).float()
        total = queries * width / world_size
        count = local.stop - local.start
        yield with_shared_rows(schema, features, dense, labels, total, count, index)


# What no manifest is: to open a pipe waits for ever, a device has no end, and 60 MB of
# JSON take a hundred times as much memory.
NO_MANIFESTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "it is not a plain file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "it is not a plain file"),
    "60 MB": (
        lambda path: path.write_bytes(b"[" + b"{}," * 20_000_000 + b"{}]"),
        r"at most [\d,]+ are read|more than the [\d,]+ bytes",
    ),
}
