"""Negatives: batches of 256 positives with 4 exact negatives each, against a Dataset that draws them in __getitem__.

    python benchmarks/negatives.py [--only exact draws in-batch] [--turns 3] [--quick]

One thread, both sides in turn. `exact` and `exact-popularity` are whole TowerBatches from a ChunkLoader without its
thread: KeyedJaggedTensors of user_id and item_id, context, labels, log q, every value checked, the user and the context
once per positive, as a shared tower reads them. `exact-repeated` has them beside every candidate, as the baseline has.
`exact-draws` is what the baseline hands out and no more: four tensors (user, item, context, label) of whole columns and
a sampler's draw. The baseline is small_model_baseline.py's Dataset under DataLoader with a collate that concatenates.
`draw-...`: a sampler's draw for 1,024 positives.
`in-batch`: the loss over 1,024 candidates of the batch with correction and masks, against a bare product with cross
entropy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch
from harness import Options, Row, command_line, in_turn, row
from small_model_baseline import (
    BATCH,
    CONTEXT,
    NEGATIVES,
    SHAPES,
    Positives,
    drawn,
    positives,
)
from torch import Tensor
from torchrec import EmbeddingBagConfig

from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.data.negatives.known_pairs import KnownPairs
from torchrec_ext.data.negatives.samplers import (
    Negatives,
    PopularityNegatives,
    UniformNegatives,
)
from torchrec_ext.modules.losses import in_batch_softmax
from torchrec_ext.modules.softmax import in_batch_negatives
from torchrec_ext.schema import BatchSchema

STEP = 1024
UNIT = "ms/batch"


def vectorised(rows: Positives, sampler: Negatives) -> Iterator[list[Tensor]]:
    """Yields the baseline's four tensors, from whole columns."""
    user, item, context = rows
    width = 1 + NEGATIVES
    label = torch.zeros(BATCH, width)
    label[:, 0] = 1
    for epoch in itertools.count():
        order = np.random.default_rng(epoch).permutation(len(user))
        for first in range(0, len(user) - BATCH + 1, BATCH):
            numbers = order[first : first + BATCH]
            users = user[numbers]
            ids = np.concatenate(
                [
                    item[numbers][:, None],
                    sampler.draw(users, numbers, epoch, NEGATIVES).ids,
                ],
                axis=1,
            )
            features = torch.from_numpy(context[numbers]).repeat_interleave(
                width, dim=0
            )
            repeated = torch.from_numpy(users.repeat(width))
            yield [
                repeated,
                torch.from_numpy(ids.ravel()),
                features,
                label.ravel().clone(),
            ]


def loaded(
    items: int, rows: Positives, sampler: Negatives, *, repeated: bool
) -> Iterator[object]:
    """Yields TowerBatches, users and context once per positive or ``repeated`` beside each candidate."""
    user, item, context = rows
    columns = {
        f"c{index}": Column(np.ascontiguousarray(context[:, index]))
        for index in range(CONTEXT)
    }
    chunk = Chunk({"user_id": Column(user), "item_id": Column(item), **columns})
    tables = [
        EmbeddingBagConfig(
            name=name, feature_names=[name], num_embeddings=size, embedding_dim=8
        )
        for name, size in (("user_id", int(user.max()) + 1), ("item_id", items + 1))
    ]
    schema = BatchSchema.from_tables(
        tables, dense=list(columns), shared=[] if repeated else ["user_id", *columns]
    )
    config = LoaderConfig(
        batch_size=BATCH, negatives=NEGATIVES, drop_last=True, prefetch=0
    )
    catalogue = Chunk({"item_id": Column(np.arange(items + 1))})
    loader = ChunkLoader(
        chunk, schema, config=config, items=catalogue, negatives=sampler
    )
    while True:
        yield from loader


def milliseconds(
    sides: dict[str, Callable[[], object]], options: Options, calls: int
) -> dict[str, list[float]]:
    """Milliseconds of a call of each side by turn, ``calls`` in a row."""
    seconds = in_turn(sides, options.turns, 3 if options.quick else calls)
    return {name: [1e3 * each for each in times] for name, times in seconds.items()}


def shapes(options: Options) -> list[str]:
    """Returns the shapes to measure."""
    return ["small"] if options.quick else list(SHAPES)


def exact(options: Options) -> Iterator[Row]:
    """Yields the rows of whole batches, and of the four tensors alone."""
    for name in shapes(options):
        items, rows = SHAPES[name].items, positives(SHAPES[name])
        uniform = UniformNegatives(items, *rows[:2])
        popular = PopularityNegatives(items, *rows[:2])
        streams: dict[str, Iterator[object]] = {
            "exact": loaded(items, rows, uniform, repeated=False),
            "exact-popularity": loaded(items, rows, popular, repeated=False),
            "exact-repeated": loaded(items, rows, uniform, repeated=True),
            "exact-draws": vectorised(rows, uniform),
        }
        streams["baseline"] = drawn(items, rows)
        ours = milliseconds(
            {side: stream.__next__ for side, stream in streams.items()}, options, 200
        )
        baseline = ours.pop("baseline")
        for side, times in ours.items():
            required = 25.0 if side in ("exact", "exact-draws") else None
            yield row(
                f"{side}, {name}", times, UNIT, baseline=baseline, required=required
            )


def draws(options: Options) -> Iterator[Row]:
    """Yields the rows of draws alone."""
    for name in shapes(options):
        yield from draws_of(name, options)


def draws_of(name: str, options: Options) -> Iterator[Row]:
    """Yields the rows of one shape, for STEP positives."""
    items, rows = SHAPES[name].items, positives(SHAPES[name])
    numbers = np.random.default_rng(1).permutation(len(rows.user))[:STEP]
    users = rows.user[numbers]
    for kind, sampler in {
        "uniform": UniformNegatives(items, *rows[:2]),
        "popularity": PopularityNegatives(items, *rows[:2]),
    }.items():
        times = milliseconds(
            {
                "draw": lambda sampler=sampler: sampler.draw(
                    users, numbers, 0, NEGATIVES
                )
            },
            options,
            50,
        )
        yield row(f"draw-{kind}, numpy, {name}", times["draw"], UNIT)


def in_batch(options: Options) -> Iterator[Row]:
    """Yields the rows of the whole loss of STEP queries with STEP candidates, forward and backward."""
    rows = positives(SHAPES["small"])
    known = KnownPairs(SHAPES["small"].items, *rows[:2])
    users, ids = rows.user[:STEP], torch.from_numpy(rows.item[:STEP])
    queries = torch.randn(STEP, 64, requires_grad=True)
    items = torch.randn(STEP, 64, requires_grad=True)
    weights, log_q = torch.ones(STEP), torch.zeros(STEP)

    def is_known(candidates: Tensor) -> Tensor:
        return torch.from_numpy(known.contains(users[:, None], candidates.numpy()))

    def loss(known_items: Callable[[Tensor], Tensor] | None = None) -> None:
        negatives = in_batch_negatives(items, ids, log_q=log_q, is_known=known_items)
        in_batch_softmax(
            queries,
            negatives,
            weights=weights,
            total_weight=weights.sum(),
            temperature=0.1,
        ).backward()

    def bare() -> None:
        torch.nn.functional.cross_entropy(
            queries @ items.T / 0.1, torch.arange(STEP)
        ).backward()

    times = milliseconds(
        {"bare": bare, "corrected": loss, "masked": lambda: loss(is_known)}, options, 5
    )
    yield row(
        f"in-batch, {STEP}, correction and hits",
        times["corrected"],
        UNIT,
        baseline=times["bare"],
    )
    yield row(
        f"in-batch, {STEP}, also known items",
        times["masked"],
        UNIT,
        baseline=times["bare"],
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    command_line(
        __doc__,
        {"exact": exact, "draws": draws, "in-batch": in_batch},
        turns=3,
        packages="numpy",
    )
