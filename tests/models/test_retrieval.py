"""RetrievalModel: on two ranks what it is on one, a gradient for everything, and what it refuses."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.contracts import gather_state, run_ranks
from tests.examples import ITEMS, META, USERS, table
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optimizers import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.retrieval import RetrievalModel
from torchrec_ext.modules.interaction import Cosine, DotProduct, TopMLP
from torchrec_ext.modules.losses import softmax_losses
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import Jagged
from torchrec_ext.train.pipelines import make_pipeline, unpipelined

ROWS = 12
COUNTS = torch.arange(ITEMS)


def retrieval(interaction: nn.Module | None = None, device: torch.device | None = None, **options: Any) -> RetrievalModel:
    torch.manual_seed(0)
    towers = {
        "user": Tower([table("user_id", USERS)], (8,), device=device),
        "item": Tower([table("item_id", ITEMS)], (8,), device=device),
    }
    torch.manual_seed(1)
    for tower in towers.values():
        for layer in tower.modules():
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
    return RetrievalModel(towers, interaction or DotProduct([8, 8]), **options)  # type: ignore[arg-type]


def batch(rank: int = 0, world_size: int = 1, *, seed: int = 0) -> TowerBatch:
    generator = torch.Generator().manual_seed(seed)
    users, items = (torch.randint(1, high, (ROWS,), generator=generator) for high in (USERS, ITEMS))
    own = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    return (
        retrieval(device=META)
        .schema()
        .assemble(
            {"user_id": Jagged(users[own]), "item_id": Jagged(items[own])},
            labels=torch.ones(len(users[own])),
            total_weight=ROWS / world_size,
        )
    )


@pytest.mark.unit
@pytest.mark.parametrize("interaction", [DotProduct([8, 8]), Cosine([8, 8], temperature=0.2)])
def test_the_loss_is_a_softmax_over_the_batch_corrected_for_popularity(interaction: nn.Module) -> None:
    model, rows = retrieval(interaction, counts=COUNTS).train(), batch()
    loss, prediction = model(rows)
    ids = rows.sparse["item_id"].values()
    user, item = model.outputs(rows)
    scores = interaction.score_all(user, item)  # type: ignore[operator]
    log_q = (COUNTS.clamp(min=1) / COUNTS.sum()).log()[ids]
    again = (ids[:, None] == ids) & ~torch.eye(ROWS, dtype=torch.bool)
    expected = softmax_losses(scores, torch.arange(ROWS), log_q=log_q, excluded=again).mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(prediction.logits, scores.diagonal())
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@pytest.mark.unit
@pytest.mark.parametrize("interaction", [DotProduct([8, 8]), Cosine([8, 8], temperature=0.2)])
def test_under_autocast_only_the_towers_are_of_16_bits(interaction: nn.Module) -> None:
    """At the logits of 20 and more that log q makes, a score in bfloat16 would be .06 off."""
    model, rows = retrieval(interaction, counts=COUNTS**4).train(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss, prediction = model(rows)
        vectors = [output.float() for output in model.outputs(rows)]
    ids = rows.sparse["item_id"].values()
    scores = interaction.score_all(*vectors)  # type: ignore[operator]
    log_q = ((COUNTS**4).clamp(min=1) / (COUNTS**4).sum()).log()[ids]
    again = (ids[:, None] == ids) & ~torch.eye(ROWS, dtype=torch.bool)
    expected = softmax_losses(scores, torch.arange(ROWS), log_q=log_q, excluded=again).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(prediction.logits, scores.diagonal())


@pytest.mark.unit
@pytest.mark.parametrize("counts", [None, COUNTS])
def test_what_a_batch_says_of_its_candidates_corrects_them(counts: torch.Tensor | None) -> None:
    """With equal scores a positive's probability is its share of 1 / q over all candidates: of 2 positives, and 2 drawn beside."""
    model = retrieval(counts=counts).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    q = torch.tensor([0.5, 0.25, 0.125, 0.125])
    rows = model.schema().assemble(
        {
            "user_id": Jagged(torch.tensor([1, 2]), torch.tensor([1, 1, 0, 0])),
            "item_id": Jagged(torch.tensor([3, 4, 5, 6])),
        },
        labels=torch.tensor([1.0, 1.0, 0.0, 0.0]),
        weights=torch.tensor([1.0, 1.0, 0.0, 0.0]),
        log_q=q.log(),
    )
    loss, _ = model(rows)
    shares = torch.tensor([2.0, 4.0]) / (2 + 4 + 8 + 8)
    torch.testing.assert_close(loss, -shares.log().mean())


@pytest.mark.unit
def test_in_evaluation_rows_are_not_compared() -> None:
    model = retrieval().eval()
    _, together = model(batch())
    torch.testing.assert_close(together.logits, model.logits(batch()))


def trained(runtime: Runtime) -> tuple[Any, list[float], list[str]]:
    model = retrieval(device=META, counts=COUNTS)
    parallel, optimizer = hybrid_parallel(
        model, runtime, optimizer=OptimizerConfig(tables="sgd", dense="sgd", dense_lr=0.05), seed=4
    )
    pipeline = make_pipeline(parallel, optimizer, runtime.device)
    batches = iter([batch(runtime.rank, runtime.world_size, seed=seed) for seed in range(6)])
    losses = [float(pipeline.progress(batches).loss) for _ in range(6)]
    return gather_state(parallel), losses, unpipelined(pipeline, parallel)


def test_two_ranks_are_one_batch() -> None:
    (one,), two = run_ranks(trained, 1), run_ranks(trained, 2)
    assert one[2] == two[0][2] == []
    assert [sum(pair) / 2 for pair in zip(two[0][1], two[1][1], strict=True)] == pytest.approx(one[1], abs=1e-5)
    for name, value in one[0].items():
        torch.testing.assert_close(two[0][0][name], value, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.unit
def test_a_network_on_top_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a candidate tower and DotProduct or Cosine, got \['user', 'item'\] and TopMLP"):
        retrieval(TopMLP([8, 8]))
