"""Whatever a registry names can be trained by a recipe, exported, and served: a place that was forgotten fails here."""

import contextlib
import io
import math
from pathlib import Path

import pytest
import torch

from tests.apps.test_training import job_of, trained
from tests.contracts import leave_group, run_ranks
from tests.settings import with_settings
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.modules.config import METRICS
from torchrec_ext.modules.interaction import INTERACTIONS
from torchrec_ext.modules.losses import LOSSES
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.scorer import RecommendRequest, Scorer
from torchx_apps.jobs.training import run_training
from torchx_apps.recipes.by_name import load_recipe

SET = (
    *(
        "data.name=planted",
        "loader.batch_size=256",
        "train.epochs=1",
    ),
    *(
        "train.compile=off",
        "model.embedding_dim=8",
        "model.tower_widths=8",
        "export=require",
    ),
)


def served(runtime: Runtime, folder: Path) -> dict[str, tuple[str, list[float]]]:
    """For each interaction its bundle's metric, and the scores of five recommendations; export checks its logits."""
    leave_group(runtime)
    answers = {}
    for name, kind in INTERACTIONS.items():
        settings = [*SET, f"model.interaction={name}"]
        two = with_settings(
            load_recipe("two_tower"), [*settings, "data.users=120", "data.items=60"]
        )
        with contextlib.redirect_stdout(io.StringIO()):
            run_training(two, folder / name)
            if kind.towers is None:
                three = with_settings(load_recipe("n_tower"), settings)
                run_training(three, folder / f"{name} of three towers")
        bundle = Bundle.load(folder / name / "bundle")
        assert bundle.users is not None
        (user,) = bundle.users.ids.ids([0])
        request = RecommendRequest(user={bundle.users.key: user}, k=5)
        answers[name] = bundle.metric, Scorer(bundle).recommend(request).scores
    return answers


@pytest.mark.slow(minutes=1)
def test_every_interaction_is_trained_exported_and_served(tmp_path: Path) -> None:
    (answers,) = run_ranks(served, 1, tmp_path)
    for name, kind in INTERACTIONS.items():
        metric, scores = answers[name]
        is_product = kind.metric is not None or name == "gmf"
        assert metric == ("product" if is_product else "top_nn")
        assert len(scores) == 5
        assert all(map(math.isfinite, scores))
        assert scores == sorted(scores, reverse=True)


@pytest.mark.unit
@pytest.mark.parametrize("name", INTERACTIONS)
def test_an_interaction_says_truly_what_it_can(name: str) -> None:
    assert list(METRICS) == list(INTERACTIONS)
    assert METRICS[name] == INTERACTIONS[name].metric
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
