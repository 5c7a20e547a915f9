"""Models of every kind over one small data set, and the trained model's own logits for any of its pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_configs import DataType

from torchrec_ext.models.multi_task import MultiTaskModel, MultiTaskTop
from torchrec_ext.models.ncf import ContextualNCF
from torchrec_ext.models.retrieval import RetrievalModel
from torchrec_ext.models.session import NextItemModel, bst
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import (
    TopMLP,
    interaction_layer,
)
from torchrec_ext.modules.session_encoder import SessionEncoder
from torchrec_ext.modules.tower import Tower, Vectors
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.catalogue import Catalogue
from torchrec_ext.retrieval.export import export
from torchrec_ext.schema import Jagged

USERS, ITEMS, D, MOST = 30, 40, 8, 5
DRAW = np.random.default_rng(0)
LENGTHS = [int(length) for length in DRAW.integers(0, MOST + 3, USERS)]
COLUMNS: dict[str, list[Any]] = {
    "user_id": list(range(USERS)),
    "history": [DRAW.integers(1, ITEMS, length).tolist() for length in LENGTHS],
    "gap": [DRAW.integers(0, 9, length).tolist() for length in LENGTHS],
    "share": [DRAW.random(length).round(3).tolist() for length in LENGTHS],
    "age": DRAW.random(USERS).round(3).tolist(),
    "profile": DRAW.normal(size=(USERS, 3)).round(3).tolist(),
    "hour": DRAW.integers(0, 24, USERS).tolist(),
    "item_id": list(range(ITEMS)),
    "price": DRAW.random(ITEMS).round(3).tolist(),
    "genres": [DRAW.integers(0, 6, 1 + item % 3).tolist() for item in range(ITEMS)],
}
FLOATS = ("age", "profile", "price", "share")


def bag(name: str, rows: int, *features: str, **options: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name,
        embedding_dim=options.pop("width", D),
        num_embeddings=rows,
        feature_names=list(features or [name]),
        **options,
    )


def lists(name: str, rows: int, *features: str) -> EmbeddingConfig:
    return EmbeddingConfig(
        name=name, embedding_dim=D, num_embeddings=rows, feature_names=list(features)
    )


def item_tower(*widths: int) -> Tower:
    tables = [bag("item_id", ITEMS), bag("genres", 6, pooling=PoolingType.MEAN)]
    return Tower(tables, list(widths), dense=["price"])


def user_tower(*widths: int, **options: Any) -> Tower:
    tables = [bag("user_id", USERS), bag("films", ITEMS, "history")]
    dense = {"age": 1, "profile": 3}
    return Tower(tables, list(widths), dense=dense, **options)


def with_interaction(name: str) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        towers = {"user": user_tower(16, 8), "item": item_tower(16, 8)}
        return TowerModel(towers, interaction_layer(name, [8, 8]))  # type: ignore[arg-type]

    return made


def three_towers() -> nn.Module:
    towers = {
        "user": user_tower(8, normalization="batch"),
        "context": Tower([bag("hour", 24)], [4]),
        "item": item_tower(8),
    }
    return TowerModel(towers, TopMLP([8, 4, 8], [16, 8], normalization="layer"))


def half() -> nn.Module:
    tables = [bag("history", ITEMS, data_type=DataType.FP16), bag("user_id", USERS)]
    towers = {"user": Tower(tables, [8]), "item": item_tower(8)}
    return TowerModel(towers, TopMLP([8, 8]), shared=("user",))


def transformer(**options: Any) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        steps = [lists("films", ITEMS, "history", "item_id"), lists("gap", 9, "gap")]
        return bst(
            steps,
            session=["history", "gap"],
            target=["item_id"],
            others={"user": Tower([bag("user_id", USERS)], [4])},
            target_tables=[bag("genres", 6)],
            target_dense=["price"],
            max_length=MOST,
            heads=2,
            **{"top_widths": (12,), **options},
        )

    return made


def steps_and_bag() -> nn.Module:
    """The latest steps of a history, and all of it in a bag."""
    return bst(
        [lists("films", ITEMS, "history", "item_id")],
        session=["history"],
        target=["item_id"],
        others={"user": Tower([bag("past", ITEMS, "history")], [4])},
        max_length=2,
        heads=2,
        top_widths=(12,),
    )


def next_item() -> nn.Module:
    encoder = SessionEncoder(D, MOST, layers=2, heads=2, causal=True)
    return NextItemModel(lists("films", ITEMS), encoder)


def tasks() -> nn.Module:
    towers = {"user": user_tower(8), "item": item_tower(8)}
    top = MultiTaskTop([8, 8], 3)
    return MultiTaskModel(towers, top, tasks={"a": 1.0, "b": 1.0, "c": 0.5})


def contextual() -> nn.Module:
    return ContextualNCF(
        USERS,
        ITEMS,
        context_tables=[bag("hour", 24, width=4)],
        context_dense=["age"],
        item_tables=[bag("genres", 6, width=4)],
        item_dense=["price"],
    )


def retrieval() -> nn.Module:
    towers = {"user": user_tower(8), "item": item_tower(8)}
    layer = interaction_layer("cosine", [8, 8], temperature=0.05)
    return RetrievalModel(towers, layer)


class Bags(nn.Module):
    """A tower class of the user's own."""

    dense: tuple[str, ...] = ("age",)

    def __init__(self) -> None:
        super().__init__()
        self.tables = [bag("user_id", USERS), bag("films", ITEMS, "history")]
        self.layer = nn.Linear(2 * D + 1, 8)
        self.out_features = 8

    def forward(self, vectors: Vectors, dense: Tensor) -> Tensor:
        keys = ("history@films", "user_id@user_id")
        both = torch.cat([*(vectors[key] for key in keys), dense], 1)  # type: ignore[misc]
        return self.layer(both).tanh()  # type: ignore[no-any-return]


def own_tower() -> nn.Module:
    item = Tower([bag("films", ITEMS, "item_id"), bag("genres", 6)], [8])
    return TowerModel({"user": Bags(), "item": item}, TopMLP([8, 8]))  # type: ignore[dict-item]


KINDS: dict[str, Callable[[], nn.Module]] = {
    **{
        name: with_interaction(name)
        for name in ("top_nn", "dot", "cosine", "gmf", "dcn", "fm")
    },
    "three towers": three_towers,
    "half": half,
    "bst": transformer(),
    "bst of two layers": transformer(layers=2),
    "bst without positions": transformer(position="none"),
    "steps and a bag": steps_and_bag,
    "next item": next_item,
    "tasks": tasks,
    "contextual": contextual,
    "retrieval": retrieval,
    "own tower": own_tower,
}


def made(kind: str, seed: int = 1) -> Any:
    """A model whose tables and layers are as large as trained ones'."""
    torch.manual_seed(seed)
    model = KINDS[kind]()
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if "embedding" in name or "bags" in name or name.endswith(("bias", "_mean")):
            nn.init.normal_(value, std=0.5)
    return model.train()


def columns_of(model: Any, side: str) -> list[str]:
    schema = model.schema()
    names = list(schema.keys)
    names += [name.partition("[")[0] for name in schema.dense]
    items = ("item_id", "price", "genres")
    own = [name for name in dict.fromkeys(names) if (name in items) == (side == "item")]
    return own


SAME = {"session": "history"}


def table(names: Sequence[str]) -> pa.Table:
    columns = {}
    for name in names:
        values = COLUMNS[SAME.get(name, name)]
        kind = pa.float32() if name in FLOATS else pa.int64()
        if isinstance(values[0], list):
            kind = pa.list_(kind)
        columns[name] = pa.array(values, kind)
    return pa.table(columns)


def exported(kind: str, folder: Path, model: Any = None, **options: Any) -> Bundle:
    model = made(kind) if model is None else model
    features = table(columns_of(model, "item"))
    export(
        model,
        folder,
        catalogue=Catalogue(ids=np.arange(ITEMS), features=features),
        queries=table(columns_of(model, "user")),
        **options,
    )
    return Bundle.load(folder)


@torch.no_grad()
def trained(
    model: Any, users: Sequence[int], items: Sequence[int], most: int | None = None
) -> Tensor:
    """(B,) logits of the model's own forward for pairs; of lists the ``most`` recent entries."""
    model.eval()
    sparse = {}
    dense = {}
    schema = model.schema()
    for side, rows in (("user", users), ("item", items)):
        for name in columns_of(model, side):
            values = [COLUMNS[SAME.get(name, name)][row] for row in rows]
            if isinstance(values[0], list) and name != "profile":
                values = [each[-(most or 10**6) :] for each in values]
            feature = schema.feature(name)
            if feature is None:
                dense[name] = torch.tensor(values)
                continue
            if not isinstance(values[0], list):
                sparse[name] = Jagged(torch.tensor(values))
                continue
            flat = [one for each in values for one in each]
            lengths = torch.tensor([len(each) for each in values])
            sparse[name] = Jagged(torch.tensor(flat, dtype=torch.int64), lengths)
    targets = torch.zeros(len(users), len(schema.tasks)) if schema.tasks else None
    batch = schema.assemble(
        sparse, dense, labels=torch.zeros(len(users)), targets=targets
    )
    if isinstance(model, NextItemModel):
        outputs = [model.embed(name, batch) for name in ("session", "item")]
        return model.interaction(outputs)  # type: ignore[no-any-return]
    return model.logits(batch)  # type: ignore[no-any-return]
