"""Rare values are unknown: what the preprocessing leaves out is trained and served without its placeholder."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.small_sets import write_ml_100k
from torchrec_ext.retrieval.bundle import Bundle
from torchx_apps import preprocess
from torchx_apps.config import with_settings
from torchx_apps.jobs.training import run_training
from torchx_apps.recipes.by_name import load_recipe


@pytest.mark.parametrize("min_count", [pytest.param(1, marks=pytest.mark.slow), 12])
def test_what_the_preprocessing_writes_is_trained_and_served_without_its_placeholder(
    min_count: int, tmp_path: Path
) -> None:
    write_ml_100k(tmp_path / "raw")
    ready = tmp_path / "sets" / "ready"
    flags = [
        f"--config.folder={tmp_path / 'raw' / 'ml-100k'}",
        f"--config.min_count={min_count}",
    ]
    assert preprocess.main(["--recipe=ml_100k", *flags, f"--out={ready}"]) == 0
    rows = pq.read_table(ready / "train").to_pydict()
    known = {one for one in rows["item_id"] if one}
    assert (0 in rows["item_id"]) == (min_count > 1), "rare ones are unknown"
    sets = [
        "data.name=ready",
        f"data.folder={tmp_path / 'sets'}",
        "train.epochs=1",
        "device=cpu",
        "export=require",
        "train.early_stop.metric=",
    ]
    run_training(with_settings(load_recipe("contextual_ncf"), sets), tmp_path / "run")
    bundle = Bundle.load(tmp_path / "run" / "bundle")
    assert len(bundle.items) == len(known)
    raw = pq.read_table(ready / "raw" / "items.parquet")["item_id"].to_pylist()
    assert set(bundle.items.ids.arrow().to_pylist()) <= set(raw)
