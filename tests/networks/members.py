"""Small networks to stack, batches for them, and what each learns alone in plain torch."""

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, PoolingType

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import Choice, OptimizerConfig
from torchrec_ext.models.tower_model import TowerModel, two_tower
from torchrec_ext.modules.interaction import TopMLP
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import BatchSchema, Jagged

USERS, ITEMS, DIM, QUERIES, CANDIDATES = 31, 23, 4, 6, 3


@dataclass(frozen=True)
class Form:
    """Which of the things that a stack must handle a network has."""

    joint: bool = False
    shared: bool = False
    weighted: bool = False


PLAIN = Form()
SHARED = Form(shared=True)
JOINT = Form(shared=True, joint=True)
WEIGHTED = Form(weighted=True)


def table(
    name: str,
    rows: int,
    feature: str | None = None,
    pooling: PoolingType = PoolingType.SUM,
) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name,
        feature_names=[feature or name],
        num_embeddings=rows,
        embedding_dim=DIM,
        pooling=pooling,
    )


def network(
    form: Form = PLAIN,
    *,
    seed: int = 0,
    dropout: float = 0.0,
    widths: Sequence[int] = (8, 4),
) -> TowerModel:
    torch.manual_seed(seed)
    history = table(
        "item_id" if form.joint else "history", ITEMS, "history", PoolingType.MEAN
    )
    item = table(
        "item_id", ITEMS, pooling=PoolingType.MEAN if form.joint else PoolingType.SUM
    )
    if form.weighted:
        user = Tower(
            [table("user_id", USERS), table("clicks", ITEMS)],
            widths,
            weights={"clicks": "clicks_weight"},
            dense=["age"],
        )
        return TowerModel(
            {"user": user, "item": Tower([item], widths)},
            TopMLP([widths[-1]] * 2, (8,)),
        )
    shared = ("user",) if form.shared else ()
    return two_tower(
        [table("user_id", USERS), history],
        [item],
        user_dense=["age"],
        tower_widths=widths,
        top_widths=(8,),
        dropout=dropout,
        shared=shared,
    )


@functools.cache
def _schema(form: Form) -> BatchSchema:
    return network(form).schema()


def batch(form: Form, seed: int) -> TowerBatch:
    """QUERIES users, each with CANDIDATES rows; histories of 0 to 3 items."""
    draw = torch.Generator().manual_seed(seed)
    rows = QUERIES * CANDIDATES
    users = QUERIES if form.shared else rows
    lengths = torch.randint(0, 4, (users,), generator=draw)
    ids = torch.randint(ITEMS, (int(lengths.sum()),), generator=draw)
    columns = {
        "user_id": Jagged(torch.randint(USERS, (users,), generator=draw)),
        "history": Jagged(ids, lengths),
        "clicks": Jagged(ids, lengths, torch.rand(len(ids), generator=draw)),
        "item_id": Jagged(torch.randint(ITEMS, (rows,), generator=draw)),
    }
    shared: dict[str, Any] = (
        {"index": CANDIDATES, "shared_rows": torch.arange(QUERIES)}
        if form.shared
        else {}
    )
    labels = torch.randint(2, (rows,), generator=draw).float()
    weights = torch.rand(rows, generator=draw)
    return _schema(form).assemble(
        columns,
        {"age": torch.rand(users, generator=draw)},
        labels=labels,
        weights=weights,
        **shared,
    )


def learn_alone(
    net: nn.Module,
    batches: Sequence[TowerBatch],
    config: OptimizerConfig,
    seed: int = 0,
) -> nn.Module:
    """A copy of ``net`` after a step on each of ``batches``, by autograd and torch's own optimizers."""
    net = copy.deepcopy(net)
    tables, dense = {}, {}
    for name, weight in net.named_parameters():
        (tables if "embedding_bags" in name else dense)[name] = weight
    by_table, by_layer = config.for_tables(net), config.for_layers(dense)
    moved = [(weight, by_table[name.split(".")[-2]]) for name, weight in tables.items()]
    moved += [(weight, by_layer[name]) for name, weight in dense.items()]
    optimizers = [_optimizer(weight, choice) for weight, choice in moved]
    torch.manual_seed(seed)
    for rows in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        net(rows)[0].backward()
        if config.clip_norm:
            torch.nn.utils.clip_grad_norm_(
                [weight for weight, _ in moved], config.clip_norm
            )
        for optimizer, (weight, choice) in zip(optimizers, moved, strict=True):
            _decay(weight, choice, any(weight is table for table in tables.values()))
            optimizer.step()
    return net


def _optimizer(weight: nn.Parameter, choice: Choice) -> torch.optim.Optimizer:
    made, arguments = choice.unfused()
    return made([weight], **arguments)  # type: ignore[arg-type]


@torch.no_grad()
def _decay(weight: nn.Parameter, choice: Choice, is_table: bool) -> None:
    if choice.weight_decay and weight.grad is not None:
        rows = (
            weight.grad.ne(0).any(dim=1).nonzero().squeeze(1)
            if is_table
            else slice(None)
        )
        weight[rows] = weight[rows] * (1 - choice.lr * choice.weight_decay)


def greatest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
