"""Models whose towers' tables are looked up together, and batches for them in parts, one for each rank."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, PoolingType

from tests.examples import ITEMS, with_shared_rows
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.tables import initialise_tables
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import TopMLP
from torchrec_ext.modules.session_tower import SessionSteps
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import BatchSchema, Jagged

DIM, ROWS, MORE = 16, 8, 16
LENGTHS = {"history": 3, "likes": 2, "genres": 2, "words": 2}


def bags(
    name: str, *features: str, pooling: PoolingType = PoolingType.MEAN
) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name,
        feature_names=list(features or (name,)),
        num_embeddings=ITEMS,
        embedding_dim=DIM,
        pooling=pooling,
    )


def listed(name: str, *features: str) -> EmbeddingConfig:
    return EmbeddingConfig(
        name=name,
        feature_names=list(features or (name,)),
        num_embeddings=ITEMS,
        embedding_dim=DIM,
    )


def towers(kind: str) -> dict[str, Any]:
    """``plain``: 4 tables each. ``shared``: a user's tower over other rows, whose items have a table of their own.

    ``sequences``: an item table of three towers: pooled, of one id, and as the steps of a session.
    """
    if kind == "plain":
        user = [
            bags("user_id"),
            bags("country", pooling=PoolingType.SUM),
            bags("history"),
            bags("likes"),
        ]
        item = [
            bags("item_id"),
            bags("genres"),
            bags("maker", pooling=PoolingType.SUM),
            bags("price_band"),
        ]
        return {
            "user": Tower(user, [16, 8]),
            "item": Tower(item, [16, 8]),
        }
    if kind == "shared":
        user = [bags("user_id"), bags("item", "history", "likes")]
        item = [bags("candidate", "item_id"), bags("genres")]
        return {
            "user": Tower(user, [16, 8]),
            "item": Tower(item, [16, 8]),
        }
    return {
        "session": SessionSteps(
            [listed("item", "history")], session=["history"], max_length=3
        ),
        "likes": Tower([bags("item", "likes"), bags("genres")], [8]),
        "item": Tower([bags("item", "item_id"), bags("user_id")], [8]),
    }


def model(kind: str, device: torch.device | None = None) -> TowerModel:
    parts = towers(kind)
    made = TowerModel(
        parts,
        TopMLP([tower.out_features for tower in parts.values()]),
        shared=["user"] if kind == "shared" else [],
        device=device,
    )
    generator = torch.Generator().manual_seed(0)
    for name, value in made.named_parameters():
        if not is_table(name):
            nn.init.normal_(value, std=0.2, generator=generator)
    if device is None:
        initialise_tables(made, seed=3)
    return made


@cache
def schema_of(kind: str) -> BatchSchema:
    return model(kind, torch.device("meta")).schema()


def batch(kind: str, step: int, parts: Sequence[int]) -> TowerBatch:
    """The rows of some ``parts``, B = 8 in each; of a shared tower Q = 24, of which each row reads one."""
    schema = schema_of(kind)
    queries = ROWS + MORE if kind == "shared" else ROWS
    columns: dict[str, list[Tensor]] = {name: [] for name in schema.keys}
    labels, index = [], []
    for part in parts:
        generator = torch.Generator().manual_seed(10 * step + part)
        for name in schema.keys:
            rows = queries if name in schema.shared else ROWS
            # Of few items, so that histories, likes and candidates meet in the same
            # rows of a table.
            columns[name].append(
                torch.randint(
                    ITEMS // 5, (rows, LENGTHS.get(name, 1)), generator=generator
                )
            )
        labels.append(torch.randint(2, (ROWS,), generator=generator).float())
        index.append(
            torch.randint(queries, (ROWS,), generator=generator) + queries * len(index)
        )
    joined = {name: torch.cat(ids) for name, ids in columns.items()}
    jagged = {
        name: Jagged(ids.reshape(-1), torch.full((len(ids),), ids.shape[1]))
        for name, ids in joined.items()
    }
    total = float(ROWS * len(parts))
    count = queries * len(parts)
    return with_shared_rows(
        schema, jagged, {}, torch.cat(labels), total, count, torch.cat(index)
    )


def by_table(state: dict[str, Any]) -> dict[str, Any]:
    """Weights or gradients with a table's name for a table's: its path depends on who looks it up."""
    return {
        name.split(".")[-2] if is_table(name) else name: value
        for name, value in state.items()
    }


def is_table(name: str) -> bool:
    return "embedding_bags." in name or "embeddings." in name
