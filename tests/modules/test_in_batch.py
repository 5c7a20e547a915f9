"""In-batch negatives on R ranks are those of one process with the concatenated batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contracts import run_ranks
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.modules.losses import in_batch_softmax
from torchrec_ext.modules.softmax import gather_rows, in_batch_negatives

B, EXTRA, ITEMS, DIM = 12, 6, 15, 5


def whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(B, generator=generator, dtype=torch.float64)
    weights[-1] = 0  # a padding row, of item 0
    ids = torch.randint(1, ITEMS, (B,), generator=generator)
    ids[-1] = 0
    extra = torch.randint(1, ITEMS, (EXTRA,), generator=generator)
    log_p = torch.log_softmax(
        torch.randn(ITEMS, generator=generator, dtype=torch.float64), 0
    )
    log_p[0] = -torch.inf
    return {
        "users": torch.randint(6, (B,), generator=generator),
        "ids": ids,
        "extra": extra,
        "weights": weights,
        "log_p": log_p,
        "known": torch.rand(6, ITEMS, generator=generator) < 0.3,
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
    extra = data["extra"][rank * EXTRA // world_size : (rank + 1) * EXTRA // world_size]
    users, ids = data["users"][local], torch.cat([data["ids"][local], extra])
    in_batch = in_batch_negatives(
        model[2](model[1](ids)),
        ids,
        log_q=data["log_p"][ids],
        queries=len(users),
        rows=rows,
        is_known=lambda items: data["known"][users[:, None], items],
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


# On 4 ranks a rank has 4 or 5 candidates; on 2 and 3 all have as many.
@pytest.mark.parametrize(
    ("world_size", "rows"), [(2, None), (2, 9), (3, None), (4, None), (4, 5), (4, 7)]
)
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


def gathered(runtime: Runtime) -> dict[str, Any]:
    ids = torch.tensor([[4, 1, 0], [1, 2, 1 << 40]])[runtime.rank]
    rows = torch.full((3, 2), runtime.rank + 1.0)
    made = in_batch_negatives(
        rows,
        ids,
        log_q=torch.tensor([-0.1, -0.2, -torch.inf]) * (1 + runtime.rank),
        queries=2,
    )
    return made._asdict()


def test_every_rank_sees_the_candidates_of_all_in_rank_order() -> None:
    for rank, made in enumerate(run_ranks(gathered, 2)):
        assert made["ids"].tolist() == [4, 1, 0, 1, 2, 1 << 40]
        assert made["candidates"][:, 0].tolist() == [1, 1, 1, 2, 2, 2]
        assert made["targets"].tolist() == [3 * rank, 3 * rank + 1]
        assert made["log_q"].dtype == torch.float32
        torch.testing.assert_close(
            made["log_q"], torch.tensor([-0.1, -0.2, 0.0, -0.2, -0.4, -torch.inf])
        )
        excluded = {
            (row, column) for row, column in made["excluded"].nonzero().tolist()
        }
        hits = {0: {(1, 3)}, 1: {(0, 1)}}[rank]
        assert excluded == {(0, 2), (1, 2)} | hits


def uneven(runtime: Runtime, what: str) -> str:
    rank = runtime.rank
    embeddings = torch.zeros(3, 2 + (rank if what == "width" else 0))
    log_q = torch.zeros(3) if what == "log_q" and rank else None
    with pytest.raises(ValueError, match="must be the same on every rank") as error:
        in_batch_negatives(embeddings, torch.tensor([1, 2, 3]), log_q=log_q)
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("width", r"D of the embeddings: [2, 3]"),
        ("log_q", "log_q given: [False, True]"),
    ],
)
def test_what_cannot_be_gathered_is_refused_on_every_rank(what: str, name: str) -> None:
    assert all(message.startswith(name) for message in run_ranks(uneven, 2, what))


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
def test_accidental_hits_and_known_items_are_never_counted(
    device: torch.device,
) -> None:
    ids = torch.tensor([3, 5, 3, 0, 8, 5], device=device)
    known = torch.zeros(3, 9, dtype=torch.bool, device=device)
    known[0, 8] = known[0, 3] = known[1, 3] = True
    made = in_batch_negatives(
        torch.zeros(6, 2, device=device),
        ids,
        queries=3,
        is_known=lambda items: known[:, items],
    )
    counted = [[int(i) for i in ids[~row]] for row in made.excluded]
    assert counted == [[3, 5, 5], [5, 8], [5, 3, 8, 5]]
    assert not made.excluded[torch.arange(3), made.targets].any()
    assert made.log_q is None


@pytest.mark.unit
def test_only_padding_is_left_out_and_what_is_unknown_has_its_own_log_q() -> None:
    """Rows: an item, two unknown ones, another item, and padding."""
    ids = torch.tensor([7, 0, 0, 5, 0])
    log_q = torch.tensor([-8.0, -7.0, -7.0, -6.0, -torch.inf])
    present = torch.tensor([True, True, True, True, False])
    made = in_batch_negatives(
        torch.eye(5), ids, log_q=log_q, queries=4, present=present
    )
    assert [row.logical_not().nonzero()[:, 0].tolist() for row in made.excluded] == [
        [0, 1, 2, 3],
        [0, 1, 3],
        [0, 2, 3],
        [0, 1, 2, 3],
    ]
    assert made.log_q is not None
    assert made.log_q.tolist() == [-8, -7, -7, -6, 0]
    assert made.ids.tolist() == ids.tolist()
    issue = in_batch_negatives(
        torch.eye(3), torch.tensor([7, 0, 5]), log_q=torch.full((3,), -8.0)
    )
    assert issue.log_q is not None
    assert issue.log_q.tolist() == [-8, -8, -8]


@pytest.mark.unit
def test_one_process_gathers_nothing() -> None:
    rows = torch.randn(3, 2, requires_grad=True)
    assert gather_rows(rows) is rows


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embeddings": torch.zeros(2, 4)}, r"embeddings: shape \(2, 4\) with 3 ids"),
        ({"ids": torch.zeros(3)}, r"ids: torch.float32 of shape \(3,\); must be int64"),
        (
            {"log_q": torch.zeros(2)},
            r"log_q: shape \(2,\), must be \(B \+ M,\) = \(3,\)",
        ),
        (
            {"present": torch.ones(2, dtype=torch.bool)},
            r"present: shape \(2,\), must be \(B \+ M,\) = \(3,\)",
        ),
        ({"queries": 4}, r"queries=4: must be 0 to 3"),
        ({"rows": 2}, r"rows=2: this rank has 3 candidates; rows must be the most"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        in_batch_negatives(
            **{
                "embeddings": torch.zeros(3, 4),
                "ids": torch.zeros(3, dtype=torch.int64),
            }
            | options
        )
