"""Dynamic ids on a GPU: the map equals a dictionary, and captured steps equal eager ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ids.test_adopted import (
    FEW,
    MANY,
    OPTIMIZERS,
    Batch,
    assert_same,
    batches,
    eager,
    made,
    policies,
)
from tests.ids.test_dynamic import POLICIES, equals_a_dictionary
from torchrec_ext.adopt import adopt
from torchrec_ext.ids import DynamicEmbeddings

pytestmark = pytest.mark.gpu


def on_gpu() -> Iterator[Batch]:
    for batch in batches():
        yield tuple(each.cuda() for each in batch)


@pytest.mark.filterwarnings("ignore:table 'users'|table 'items'")
@pytest.mark.parametrize("name", ["second sight", "fewer rows than a batch has ids"])
def test_the_map_on_the_gpu_equals_a_dictionary(name: str) -> None:
    counts = equals_a_dictionary(
        *POLICIES[name], batches=20, size=240, device=torch.device("cuda")
    )
    assert counts["admitted"] > 0
    assert counts["evicted"] > 0


@pytest.mark.parametrize(
    ("kind", "rows"), [("adam", FEW), ("sgd", MANY), ("adagrad", MANY)]
)
def test_captured_steps_equal_the_loop_with_dynamic_embeddings(
    kind: str, rows: int
) -> None:
    runs = []
    losses: list[list[float]] = []
    for is_captured in (False, True):
        model, _, loss = made(kind, rows)
        model.cuda()
        optimizer = OPTIMIZERS[kind](model.parameters())
        ids = DynamicEmbeddings(model, optimizer, policies(rows))
        if is_captured:
            step = adopt(model, optimizer, loss, ids=ids, compile="require", verify=2)
            losses.append([float(step(*batch)[0]) for batch in on_gpu()])
            assert step.describe().startswith("captured since step 3"), step.describe()
        else:
            losses.append(eager(model, optimizer, loss, on_gpu()))
        runs.append((model, optimizer, ids))
    assert runs[0][2].ids.counts["evicted"] > 20
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert_same(runs[0], runs[1], within=5e-3 if kind == "adam" else 1e-5)
