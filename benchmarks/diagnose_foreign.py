"""Programs of others under why_slow, of shapes that are ours: the rows `foreign` and `end-to-end` of diagnose.py.

    python benchmarks/diagnose_foreign.py NAME BUDGET_S

TorchRec's golden training is DLRM on its own random data. torch-rechub's DSSM reads its own Dataset, RecBole's NeuMF
batches in memory. `pip install --no-deps --target FOLDER torch-rechub recbole`, with FOLDER on PYTHONPATH, brings both
(they import what tests/foreign/test_adopted_models.py names); where one cannot be imported its program is left out, and
stderr says why.
Last line: one JSON object.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import adopt as adopted_ncf
import torch
import torch.nn.functional as F
from harness import Options, Row, Trainings, last_json, row
from small_model_baseline import BATCH, SHAPES, Interactions, PlainNCF, positives
from torch import Tensor, nn
from torch.utils.data import DataLoader

from torchrec_ext.diagnose import why_slow

USERS, ITEMS, B, D, ROWS = 20_000, 10_000, 256, 16, 50_000
LIMIT_S = 300.0
CAPTURED = "the step captured by adopt"


class Foreign(NamedTuple):
    """A program of somebody else's, as it is given to why_slow."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[..., Any]
    batches: Any


def columns() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = {
        name: torch.randint(1, size, (ROWS,), generator=draw)
        for name, size in (("user_id", USERS), ("age", 9))
    }
    ids |= {
        name: torch.randint(1, ITEMS, (ROWS,), generator=draw)
        for name in ("item_id", "neg_item_id")
    }
    return ids


def rechub_dssm() -> Foreign:
    from torch_rechub.basic.features import SparseFeature
    from torch_rechub.models.matching.dssm import DSSM
    from torch_rechub.utils.data import TorchDataset

    user = [
        SparseFeature(name, size, D) for name, size in (("user_id", USERS), ("age", 9))
    ]
    layers = {"dims": [128, 64], "activation": "prelu"}
    model = DSSM(
        user,
        [SparseFeature("item_id", ITEMS, D)],
        dict(layers),
        dict(layers),
        temperature=0.02,
    )
    data = TorchDataset(
        {name: each.numpy() for name, each in columns().items()},
        torch.randint(2, (ROWS,)).float().numpy(),
    )
    loader = DataLoader(data, B, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return Foreign(
        model, optimizer, lambda x, y: F.binary_cross_entropy(model(x), y), loader
    )


class Settings(dict[str, Any]):
    """RecBole's Config: a setting that nobody gave is None."""

    def __missing__(self, key: str) -> None:
        return None


def recbole_neumf() -> Foreign:
    from recbole.model.general_recommender.neumf import NeuMF

    fields = {
        "USER_ID_FIELD": "user_id",
        "ITEM_ID_FIELD": "item_id",
        "NEG_PREFIX": "neg_",
        "LABEL_FIELD": "label",
    }
    sizes = {
        "mf_embedding_size": 64,
        "mlp_embedding_size": 64,
        "mlp_hidden_size": [128, 64],
        "dropout_prob": 0.1,
    }
    dataset = SimpleNamespace(num=lambda field: USERS if field == "user_id" else ITEMS)
    model = NeuMF(
        Settings(device="cpu", mf_train=True, mlp_train=True, **fields, **sizes),
        dataset,
    )
    rows = {**columns(), "label": torch.randint(2, (ROWS,)).float()}
    batches = [
        {name: each[start : start + 2048] for name, each in rows.items()}
        for start in range(0, 40_000, 2048)
    ]
    return Foreign(
        model, torch.optim.Adam(model.parameters(), 1e-3), model.calculate_loss, batches
    )


def dlrm(rows: int = 10_000, dim: int = 64, batch: int = 512) -> tuple[nn.Module, Any]:
    """TorchRec's examples/golden_training: DLRM, and its random rows of Criteo's columns; with smaller tables."""
    from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES
    from torchrec.datasets.random import RandomRecDataset
    from torchrec.models.dlrm import DLRM, DLRMTrain
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}",
            embedding_dim=dim,
            num_embeddings=rows,
            feature_names=[name],
        )
        for name in DEFAULT_CAT_NAMES
    ]
    model = DLRM(
        embedding_bag_collection=EmbeddingBagCollection(tables=tables),
        dense_in_features=len(DEFAULT_INT_NAMES),
        dense_arch_layer_sizes=[64, dim],
        over_arch_layer_sizes=[64, 1],
    )
    data = RandomRecDataset(
        DEFAULT_CAT_NAMES, batch, hash_size=rows, ids_per_feature=1, num_dense=len(DEFAULT_INT_NAMES),
        manual_seed=0, num_generated_batches=10, num_batches=10,
    )  # fmt: skip
    return DLRMTrain(model), data


def golden_alone() -> Foreign:
    model, batches = dlrm()
    return Foreign(
        model,
        torch.optim.Adagrad(model.parameters(), lr=0.1),
        lambda batch: model(batch),
        list(batches),
    )


def users_script() -> Foreign:
    shape = SHAPES["small"]
    model, criterion = PlainNCF(shape.users, shape.items), nn.BCEWithLogitsLoss()
    data = Interactions(shape.items, positives(shape))
    loader = DataLoader(data, BATCH, shuffle=True, collate_fn=adopted_ncf.collate)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return Foreign(
        model, optimizer, lambda u, i, c, y: criterion(model(u, i, c), y), loader
    )


PROGRAMS: dict[str, tuple[str, Callable[[], Foreign]]] = {
    "TorchRec's golden DLRM": ("torchrec", golden_alone),
    "torch-rechub's DSSM": ("torch_rechub.models.matching.dssm", rechub_dssm),
    "RecBole's NeuMF": ("recbole.model.general_recommender.neumf", recbole_neumf),
    "the user's script": ("torch", users_script),
}


def diagnosed(name: str, budget_s: float) -> None:
    """Diagnoses a program and its captured step, and prints what came of it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, optimizer, loss, batches = PROGRAMS[name][1]()
    diagnosis = why_slow(
        model, optimizer, loss, batches, budget_s=budget_s, capture=True
    )
    print(diagnosis)
    gains = [trial.gain.middle for trial in diagnosis.trials if trial.name == CAPTURED]
    made = {
        "verdict": diagnosis.verdict,
        "why_not": diagnosis.facts.not_measured.get("captured", ""),
        "gain": gains[0] if gains else 1.0,
    }
    print(json.dumps(made))


def missing(module: str) -> str:
    """Returns why a module cannot be imported; empty where it can."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def foreign(options: Options) -> Iterator[Row]:
    """Yields a verdict for each program, and what its captured step gained."""
    budget_s = 2.0 if options.quick else 25.0
    for name, (module, _) in PROGRAMS.items():
        if why := missing(module):
            print(f"foreign, {name}: left out: {why}", file=sys.stderr, flush=True)
            continue
        made = last_json([sys.executable, __file__, name, budget_s], limit_s=LIMIT_S)
        yield row(
            f"foreign, {name}",
            made["gain"],
            "times as fast, captured",
            better="more",
            verdict=made["verdict"],
            why_not=made["why_not"],
        )


def end_to_end(options: Options) -> Iterator[Row]:
    """Yields what small_model_baseline.py gains from one remedy to the next, and the product of these factors."""
    import diagnose

    shape, steps = SHAPES["small"], 20 if options.quick else 300
    script = diagnose.ncf("small", shape.rows)
    whole_batches = diagnose.read_together(None)

    def over(
        step: Callable[..., object], batches: Any
    ) -> Callable[[Callable[[], bool]], None]:
        def loop(stop: Callable[[], bool]) -> None:
            while True:
                for batch in batches:
                    step(*batch)
                    if stop():
                        return

        return loop

    def on_one_thread(
        loop: Callable[[Callable[[], bool]], None],
    ) -> Callable[[Callable[[], bool]], None]:
        def run(stop: Callable[[], bool]) -> None:
            torch.set_num_threads(1)  # of this side's own thread
            loop(stop)

        return run

    plain = diagnose.usual(script)
    inside = adopted_ncf.adopted(shape, adopted_ncf.columns_of(shape))
    sides = {
        "small_model_baseline.py": over(plain, script.batches),
        "one thread": on_one_thread(over(plain, script.batches)),
        "rows read together": on_one_thread(over(plain, whole_batches)),
        "adopted": on_one_thread(over(adopted_ncf.adopted(shape), whole_batches)),
        "batches made inside the step": on_one_thread(adopted_ncf.over_rows(inside)),
    }
    trainings = Trainings(sides)
    # More than an epoch: the last batch of one has a shape of its own, for which the
    # step is captured once.
    times = trainings.seconds_per_step(
        steps, options.turns, warm_up=50 if options.quick else 350
    )
    trainings.close()
    names = list(sides)
    medians = {name: statistics.median(each) for name, each in times.items()}
    factors = {
        after: round(medians[before] / medians[after], 2)
        for before, after in itertools.pairwise(names)
    }
    products = [
        first / last
        for first, last in zip(times[names[0]], times[names[-1]], strict=True)
    ]
    yield row(
        "end-to-end",
        products,
        "times as fast, the product",
        better="more",
        factors=factors,
    )


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    diagnosed(sys.argv[1], float(sys.argv[2]))
