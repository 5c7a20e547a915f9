"""In-batch negatives on R ranks are those of one process with the concatenated batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contracts import run_ranks
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.modules.losses import in_batch_softmax
from torchrec_ext.modules.softmax import in_batch_negatives

B, ITEMS, DIM = 12, 15, 5


def whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(B, generator=generator, dtype=torch.float64)
    weights[-1] = 0  # a padding row, of item 0
    ids = torch.randint(1, ITEMS, (B,), generator=generator)
    ids[-1] = 0
    log_p = torch.log_softmax(
        torch.randn(ITEMS, generator=generator, dtype=torch.float64), 0
    )
    log_p[0] = -torch.inf
    return {
        "users": torch.randint(6, (B,), generator=generator),
        "ids": ids,
        "weights": weights,
        "log_p": log_p,
    }


def towers() -> nn.ModuleList:
    torch.manual_seed(1)
    user = nn.Embedding(6, DIM, dtype=torch.float64)
    item = nn.Embedding(ITEMS, DIM, dtype=torch.float64)
    return nn.ModuleList([user, item, nn.Linear(DIM, DIM, dtype=torch.float64)])


def step(
    rank: int, world_size: int, rows: int | None = None
) -> tuple[float, list[Tensor]]:
    """The loss of one rank and its gradients, from its share of the batch."""
    data, model = whole(), towers()
    local = slice(rank * B // world_size, (rank + 1) * B // world_size)
    users, ids = data["users"][local], data["ids"][local]
    in_batch = in_batch_negatives(
        model[2](model[1](ids)),
        ids,
        log_q=data["log_p"][ids],
        rows=rows,
    )
    loss = in_batch_softmax(
        model[0](users),
        in_batch,
        weights=data["weights"][local],
        total_weight=data["weights"].sum() / world_size,
        temperature=0.4,
    )
    loss.backward()
    return float(loss.detach()), [
        p.grad for p in model.parameters() if p.grad is not None
    ]


def ranks_step(runtime: Runtime, rows: int | None) -> tuple[float, list[Tensor]]:
    return step(runtime.rank, runtime.world_size, rows)


# On 5 ranks a rank has 2 or 3 candidates; on 2 all have as many.
@pytest.mark.parametrize(("world_size", "rows"), [(2, 6), (5, None), (5, 7)])
def test_the_mean_over_ranks_is_one_process_with_the_concatenated_batch(
    world_size: int, rows: int | None
) -> None:
    loss, gradients = step(0, 1)
    made = run_ranks(ranks_step, world_size, rows)
    assert sum(rank[0] for rank in made) / world_size == pytest.approx(loss, abs=1e-12)
    for place, expected in enumerate(gradients):
        torch.testing.assert_close(
            sum(rank[1][place] for rank in made) / world_size,
            expected,
            rtol=0,
            atol=1e-12,
        )


def nothing(runtime: Runtime) -> list[Any]:
    """Rank 1 has no row at all; the gradient of what rank 0 sees of it is empty."""
    rows = torch.ones(2 - 2 * runtime.rank, 3, requires_grad=True)
    made = in_batch_negatives(rows, torch.arange(1, 1 + len(rows)))
    made.candidates.sum().backward()
    return [
        made.ids.tolist(),
        made.excluded.tolist(),
        None if rows.grad is None else rows.grad.tolist(),
    ]


def test_a_rank_without_rows_takes_part() -> None:
    first, second = run_ranks(nothing, 2)
    assert first == [[1, 2, 0, 0], [[False, False, True, True]] * 2, [[2.0] * 3] * 2]
    assert second == [[1, 2, 0, 0], [], []]


@pytest.mark.unit
def test_accidental_hits_are_never_counted(device: torch.device) -> None:
    ids = torch.tensor([3, 5, 3, 0, 8, 5], device=device)
    made = in_batch_negatives(torch.zeros(6, 2, device=device), ids)
    counted = [[int(i) for i in ids[~row]] for row in made.excluded[:3]]
    assert counted == [[3, 5, 8, 5], [3, 5, 3, 8], [5, 3, 8, 5]]
    assert not made.excluded[torch.arange(6), made.targets].any()
    assert made.log_q is None


@pytest.mark.unit
def test_only_padding_is_left_out_and_what_is_unknown_has_its_own_log_q() -> None:
    """Rows: an item, two unknown ones, another item, and padding."""
    ids = torch.tensor([7, 0, 0, 5, 0])
    log_q = torch.tensor([-8.0, -7.0, -7.0, -6.0, -torch.inf])
    present = torch.tensor([True, True, True, True, False])
    made = in_batch_negatives(torch.eye(5), ids, log_q=log_q, present=present)
    excluded = made.excluded[:4]
    assert [row.logical_not().nonzero()[:, 0].tolist() for row in excluded] == [
        [0, 1, 2, 3],
        [0, 1, 3],
        [0, 2, 3],
        [0, 1, 2, 3],
    ]
    assert made.log_q is not None
    assert made.log_q.tolist() == [-8, -7, -7, -6, 0]
    assert made.ids.tolist() == ids.tolist()
