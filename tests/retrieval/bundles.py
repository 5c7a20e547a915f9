"""A small catalogue and its users, and bundles of the small model over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.examples import ITEMS, USERS, redrawn, small_model
from torchrec_ext.models.tower_model import Interaction, TowerModel
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.exporting.content import Catalogue, NamedUsers
from torchrec_ext.retrieval.exporting.export import export


def contents(seed: int = 0, items: int = ITEMS - 1) -> dict[str, Any]:
    """Items and users with ids from 1, as the tables' rows are; row 0 is the unknown one."""
    rng = np.random.default_rng(seed)
    ids, users = np.arange(1, items + 1), np.arange(1, USERS)
    history = pa.array(
        [rng.integers(1, ITEMS, rng.integers(0, 5)).tolist() for _ in users],
        type=pa.list_(pa.int64()),
    )
    positions = pa.array(
        [[int(user) % items] for user in users], type=pa.list_(pa.int64())
    )
    features = {
        "user_id": users,
        "history": history,
        "age": rng.random(len(users)).astype(np.float32),
    }
    return {
        "catalogue": Catalogue(
            ids=ids,
            features=pa.table(
                {"item_id": ids, "price": rng.random(items).astype(np.float32)}
            ),
            titles=[f"Film {item}" for item in ids],
            categories=[["drama"] if item % 2 else ["drama", "war"] for item in ids],
            trained=ids,
        ),
        "users": NamedUsers(
            key="user_id",
            ids=users,
            features=pa.table(features),
            unknown={"user_id": 0, "history": [], "age": 0.0},
            seen=positions,
            liked=positions,
        ),
    }


def model_of(interaction: Interaction = "top_nn", seed: int = 0) -> TowerModel:
    """The same weights for the same seed."""
    return redrawn(small_model(interaction=interaction), seed, tables=seed)


def bundle_of(
    folder: Path, interaction: Interaction = "top_nn", seed: int = 0, **settings: Any
) -> Bundle:
    """Exported into ``folder``, and loaded."""
    export(model_of(interaction, seed), folder, **{**contents(), **settings})
    return Bundle.load(folder)
