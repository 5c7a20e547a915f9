"""RecBole's own evaluation of given vectors: full ranking by dot product, its figures and its seconds.

    python benchmarks/recbole_evaluation.py FOLDER TURNS

FOLDER has users, items, truth and seen .parquet, as benchmarks/chain.py writes them. The vectors are put into RecBole's
BPR, and `Trainer.evaluate` is timed with its default batch, of 4,096 scores, and with batches of 32 and 256 users, of
which the fastest counts as its best. RecBole 1.2.1 asks for ray at its import and for names that numpy 2 has no more;
both get stand-ins that no evaluation uses. Imports nothing of torchrec_ext. Last line: one JSON object.
"""

import importlib.metadata
import json
import os
import sys
import tempfile
import time
import types
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import torch

DEFAULT = 4096  # RecBole's own eval_batch_size, in scores

for _name, _kind in (
    ("float_", np.float64),
    ("complex_", np.complex128),
    ("unicode_", np.str_),
):
    if not hasattr(np, _name):
        setattr(np, _name, _kind)
for _name in ("bool", "int", "float", "object", "str", "long"):
    if not hasattr(np, _name):
        setattr(np, _name, object)
_ray = types.ModuleType("ray")
_ray.tune = types.ModuleType("ray.tune")
sys.modules |= {
    name: sys.modules.get(name, module)
    for name, module in (("ray", _ray), ("ray.tune", _ray.tune))
}

from recbole.config import Config  # noqa: E402
from recbole.data import create_dataset, data_preparation  # noqa: E402
from recbole.model.general_recommender import BPR  # noqa: E402
from recbole.trainer import Trainer  # noqa: E402


def atomic_files(folder, target):
    """Writes the pairs as RecBole's benchmark files; of a user without pairs to find nothing is asked."""
    for part, name in (("seen", "train"), ("truth", "valid"), ("truth", "test")):
        pairs = pd.read_parquet(folder / f"{part}.parquet").sort_values(
            ["user", "item"]
        )
        pairs.columns = ["user_id:token", "item_id:token"]
        pairs.to_csv(target / f"set.{name}.inter", sep="\t", index=False)


def evaluator(folder, scores):
    """RecBole's trainer and test data over the vectors, in batches of so many scores."""
    vectors = {
        name: pd.read_parquet(folder / f"{name}.parquet") for name in ("users", "items")
    }
    with tempfile.TemporaryDirectory() as name:
        target = Path(name) / "set"
        target.mkdir()
        atomic_files(folder, target)
        config = Config(
            model="BPR",
            dataset="set",
            config_dict={
                "data_path": name,
                "benchmark_filename": ["train", "valid", "test"],
                "load_col": {"inter": ["user_id", "item_id"]},
                "eval_args": {"group_by": "user", "order": "RO", "mode": "full"},
                "metrics": ["Recall", "NDCG", "Hit", "MRR", "MAP"],
                "topk": [10],
                "metric_decimal_place": 12,
                "valid_metric": "NDCG@10",
                "embedding_size": 64,
                "eval_batch_size": scores,
                "show_progress": False,
                "use_gpu": False,
                "state": "ERROR",
                "checkpoint_dir": name,
            },
        )
        dataset = create_dataset(config)
        train, _, test = data_preparation(config, dataset)
    # Users and items that no pair names have no row in RecBole; RecBole's row 0 is
    # padding.
    model = BPR(config, train.dataset)
    for kind, table, field in (
        ("users", model.user_embedding, "user_id"),
        ("items", model.item_embedding, "item_id"),
    ):
        ids = train.dataset.field2id_token[field][1:].astype(np.int64)
        rows = np.stack(vectors[kind]["vector"].to_numpy())[ids]
        table.weight.data[1:] = torch.from_numpy(rows)
    return Trainer(config, model), test


def main():
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    folder, turns = Path(sys.argv[1]).resolve(), int(sys.argv[2])
    os.chdir(folder)  # RecBole leaves folders where it runs
    items = len(pd.read_parquet(folder / "items.parquet", columns=["id"]))
    seconds = {}
    for scores in (DEFAULT, 32 * items, 256 * items):
        trainer, test = evaluator(folder, scores)
        seconds[scores] = []
        for _ in range(turns):
            start = time.perf_counter()
            figures = trainer.evaluate(test, load_best_model=False)
            seconds[scores].append(time.perf_counter() - start)
    best = min(seconds, key=lambda scores: min(seconds[scores]))
    result = {
        "recbole": importlib.metadata.version("recbole"),
        "default": {"eval_batch_size": DEFAULT, "seconds": seconds[DEFAULT]},
        "best": {"eval_batch_size": best, "seconds": seconds[best]},
        "figures": {
            name.replace("hit", "hr"): float(value) for name, value in figures.items()
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
