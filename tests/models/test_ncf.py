"""ContextualNCF: the published size, the paper's network, user and context computed once, sharded equals unsharded."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingBagConfig

from tests.contracts import run_ranks
from tests.examples import META, by_table, pair_batches, redrawn
from tests.sharded import Case, Learned, alone, check_equal, on_ranks
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.tables import initialise_tables
from torchrec_ext.models.ncf import ContextualNCF

USERS, ITEMS, HOURS, GENRES = 40, 30, 7, 5
QUERIES, WIDTH = 6, 5


def table(name: str, rows: int, dim: int = 4) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, feature_names=[name], num_embeddings=rows, embedding_dim=dim
    )


def model(
    shared: tuple[str, ...] = (), device: torch.device | None = None, **options: Any
) -> ContextualNCF:
    torch.manual_seed(0)
    arguments: dict[str, Any] = {
        "context_tables": [table("hour", HOURS)],
        "context_dense": ["temperature"],
        "item_tables": [table("genres", GENRES)],
        "item_dense": ["price"],
        "embedding_std": 0.3,  # so that the products are seen
    }
    made = ContextualNCF(
        USERS, ITEMS, shared=shared, device=device, **(arguments | options)
    )
    return redrawn(made, 1, tables=3 if device is None else None)


def batches(
    count: int, *, shared: bool = False, rank: int = 0, world_size: int = 1
) -> Iterator[TowerBatch]:
    """Batches of users in a context with candidates."""
    return pair_batches(
        model(("user",) if shared else (), META).schema(),
        count,
        {
            "user_id": (USERS, 1),
            "hour": (HOURS, 1),
            "item_id": (ITEMS, 1),
            "genres": (GENRES, 2),
        },
        of_query=("user_id", "hour", "temperature"),
        queries=QUERIES,
        width=WIDTH,
        rank=rank,
        world_size=world_size,
    )


def written_out(made: ContextualNCF, batch: TowerBatch) -> Tensor:
    """The network as the paper draws it: one layer after another over the concatenation."""
    weights = {name: value.detach() for name, value in made.named_parameters()}
    bags = {
        key: jagged.to_padded_dense(2).long()
        for key, jagged in batch.sparse.to_dict().items()
    }

    def look_up(name: str, feature: str, ids: int = 1) -> Tensor:
        rows = weights[f"look_ups.collections.rows.embedding_bags.{name}.weight"]
        return rows[bags[feature][:, :ids]].sum(1)

    gmf = look_up("user_id_gmf", "user_id") * look_up("item_id_gmf", "item_id")
    user = [
        look_up("user_id_mlp", "user_id"),
        look_up("hour", "hour"),
        batch.dense[:, :1],
    ]
    item = [
        look_up("item_id_mlp", "item_id"),
        look_up("genres", "genres", 2),
        batch.dense[:, 1:],
    ]
    first = torch.cat(
        [weights[f"towers.{tower}.mlp.linear.weight"] for tower in ("user", "item")],
        dim=1,
    )
    hidden = torch.relu(
        torch.cat(user + item, dim=1) @ first.T + weights["towers.user.mlp.linear.bias"]
    )
    for layer in (2, 5):
        hidden = torch.relu(
            hidden @ weights[f"interaction.rest.{layer}.weight"].T
            + weights[f"interaction.rest.{layer}.bias"]
        )
    predict = (
        weights["interaction.predict.weight"][0],
        weights["interaction.predict.bias"],
    )
    return torch.cat([gmf, hidden], dim=1) @ predict[0] + predict[1]


@pytest.mark.unit
def test_logits_are_those_of_the_network_as_published() -> None:
    made, batch = model(), next(batches(1))
    assert written_out(made, batch).std() > 0.01
    torch.testing.assert_close(
        made.logits(batch).detach(), written_out(made, batch), rtol=0, atol=1e-6
    )


@pytest.mark.unit
@pytest.mark.parametrize("mlp_widths", [(32, 16, 8), (64,)])
def test_the_whole_catalogue_scores_as_the_pairs_do(
    mlp_widths: tuple[int, ...],
) -> None:
    made, batch = model(mlp_widths=mlp_widths).eval(), next(batches(1))
    query, items = made.embed("user", batch)[::WIDTH], made.embed("item", batch)
    scores = made.interaction.score_all(query, items)  # type: ignore[operator]
    one_by_one = made.interaction(
        [query.repeat_interleave(len(items), 0), items.repeat(len(query), 1)]
    )
    torch.testing.assert_close(
        scores, one_by_one.view(len(query), len(items)), rtol=0, atol=1e-6
    )
    own = scores.view(QUERIES, QUERIES, WIDTH)[range(QUERIES), range(QUERIES)]
    torch.testing.assert_close(own.reshape(-1), made.logits(batch), rtol=0, atol=1e-6)


@pytest.mark.unit
def test_first_values_are_the_papers() -> None:
    made = ContextualNCF(
        4_000, 3_000, context_dense=[f"context_{i}" for i in range(21)]
    )
    initialise_tables(made, seed=0)
    for name, parameter in made.named_parameters():
        if "embedding_bags" in name:
            assert parameter.detach().std().item() == pytest.approx(0.01, rel=0.02), (
                name
            )
        elif name.endswith("bias"):
            assert not parameter.any(), name
    towers = [
        made.towers[tower].mlp.linear.weight.abs().max() for tower in ("user", "item")
    ]  # type: ignore[union-attr]
    for largest in towers:
        assert largest.item() == pytest.approx(math.sqrt(6 / (85 + 32)), rel=0.02)
    assert made.interaction.predict.weight.abs().max().item() <= math.sqrt(3 / 16)  # type: ignore[union-attr, operator]


@pytest.mark.unit
def test_a_wrong_declaration_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mlp_widths=\[\]: the MLP half needs"):
        ContextualNCF(5, 5, mlp_widths=())


def shared_model(device: torch.device | None = None) -> ContextualNCF:
    return model(("user",), device)


def plain_model(device: torch.device | None = None) -> ContextualNCF:
    return model((), device)


def case(shared: bool, sharding: str) -> Case:
    return Case(
        shared_model if shared else plain_model,
        partial(batches, 20, shared=shared),
        OptimizerConfig(tables_lr=0.1),
        PlanConfig(sharding=sharding),  # type: ignore[arg-type]
        20,
    )


CASES = {
    name: case(*name)
    for name in ((False, "table_wise"), (True, "row_wise"), (True, "data_parallel"))
}


def test_sharded_equals_unsharded_with_user_and_context_computed_once() -> None:
    expected = alone(case(False, "auto"))._asdict()
    expected["state"] = by_table(expected["state"])
    ranks = run_ranks(on_ranks, 2, CASES)
    for name in CASES:
        found = [rank[name] for rank in ranks]
        found[0] = found[0]._replace(state=by_table(found[0].state))
        check_equal(found, Learned(**expected))
