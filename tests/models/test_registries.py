"""Whatever a registry names is what a recipe builds, and a loss is learned: a place that was forgotten fails here.

That each interaction is served as it was trained is in tests/retrieval/test_export.py.
"""

from typing import Any

import pytest
import torch

from tests.apps.test_training import SMALL, job_of, trained
from tests.contracts import run_ranks
from torchrec_ext.modules.config import METRICS
from torchrec_ext.modules.interaction import INTERACTIONS
from torchrec_ext.modules.losses import LOSSES
from torchx_apps.jobs.setup import build_model


@pytest.mark.unit
@pytest.mark.parametrize("name", INTERACTIONS)
def test_an_interaction_says_truly_what_it_can(name: str) -> None:
    assert list(METRICS) == list(INTERACTIONS)
    assert METRICS[name] == INTERACTIONS[name].metric
    job = job_of("two_tower", *SMALL, f"model.interaction={name}")
    model: Any = build_model(job, job.task(job.data))
    assert type(model.interaction) is INTERACTIONS[name]
    torch.manual_seed(0)
    interaction = INTERACTIONS[name]([8, 8])
    queries, candidates = torch.randn(3, 8), torch.randn(40, 8)
    scores = interaction.score_all(queries, candidates)
    if interaction.metric == "cosine":
        queries, candidates = (
            torch.nn.functional.normalize(rows) for rows in (queries, candidates)
        )
    if interaction.metric is not None:
        assert torch.equal(scores.argsort(1), (queries @ candidates.T).argsort(1))
    if interaction.temperature is not None:
        assert scores.abs().max() <= 1 / interaction.temperature


ROWS = {
    "pairwise": ("loader.negatives=4",),
    "in_batch": ("loader.negatives=0", "loader.batch_size=512"),
}


@pytest.mark.parametrize(
    "name",
    # The default run trains a loss of labels and one of the batch.
    [
        pytest.param(
            name, marks=() if name in ("bce", "in_batch") else pytest.mark.slow
        )
        for name in LOSSES
    ],
)
def test_every_loss_learns_planted_tastes(name: str) -> None:
    kind = LOSSES[name]
    rows = ROWS["in_batch"] if kind.shared else ROWS["pairwise"]
    job = job_of(
        "two_tower",
        *("data.name=planted", "data.users=1000", "data.items=200"),
        *(
            f"model.loss={name}",
            "model.interaction=dot",
            "train.epochs=5",
            "optimizer.tables_lr=0.1",
            *rows,
        ),
    )
    (outcome,) = run_ranks(trained, 1, job)
    assert outcome.test["ndcg@10"] > 1.4 * outcome.baseline["ndcg@10"]
