"""Whatever a registry names is what a recipe builds: a place that was forgotten fails here.

That each interaction is served as it was trained is in tests/retrieval/test_export.py.
"""

from typing import Any

import pytest
import torch

from tests.apps.test_training import SMALL, job_of
from torchrec_ext.modules.config import METRICS
from torchrec_ext.modules.interaction import INTERACTIONS
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
