"""Every option works with every other, or is refused by name before the first step.

A cell is a choice for every option: a recipe with one or two short epochs on planted data, through the same `run` that
a command calls. A cell that runs gives finite figures above chance, equal on all ranks, and a bundle that answers where
one was asked for. REFUSED holds the combinations that are refused, with the words that say so; a refusal that is not
there is a failure, and so is a combination there that runs. A new option enters OPTIONS with the commit that adds it.
The default run tries each choice, each refusal and many pairs; the slow run all pairs and many triples.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from covertable import make

from tests.contracts import leave_group, run_ranks
from tests.distributed.shared_memory.conftest import missing as no_library
from torchrec_ext.data import planted
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.retrieval.bundle import AUDIT, Bundle
from torchrec_ext.retrieval.catalogue import read_table
from torchrec_ext.retrieval.scorer import RecommendRequest, Scorer
from torchx_apps import recipes
from torchx_apps.config import with_settings
from torchx_apps.jobs.training import run_training
from torchx_apps.recipes.by_name import load_recipe

Cell = Mapping[str, str]


class Planted(NamedTuple):
    """A recipe on planted data: overrides that let it learn from few rows, and the least figure that is not chance."""

    overrides: tuple[str, ...]
    figure: str = "hr@10"
    above: float = 0.13  # ten items at random of the 87 that a user has not taken: .115


_RATINGS = (
    "data.name=planted",
    "data.users=600",
    "data.items=100",
    "loader.batch_size=256",
    "train.epochs=2",
)
_ROWS = (
    "data.name=planted",
    "loader.batch_size=1024",
    "optimizer.tables_lr=0.02",
    "optimizer.dense_lr=0.01",
    "train.epochs=2",
)
_ADAM = ("optimizer.tables_lr=0.02", "optimizer.dense_lr=0.01")
RECIPES = {
    "two_tower": Planted(_RATINGS),
    "retrieval": Planted(
        (
            *_RATINGS,
            "data.history_length=20",
            "model.embedding_dim=16",
            "model.tower_widths=32",
        )
    ),
    "ncf": Planted((*_RATINGS, *_ADAM)),
    "contextual_ncf": Planted(
        (*_ROWS, "model.embedding_std=0.1", "train.early_stop.metric="),
        figure="auc",
        above=0.55,
    ),
    "n_tower": Planted(
        (
            *(
                *_ROWS,
                "model.top_widths=32",
                "model.embedding_std=0.1",
                "model.dropout=0",
                "optimizer.tables_l2=0",
            ),
            *(
                "train.tables_schedule.kind=constant",
                "train.dense_schedule.kind=constant",
                "train.early_stop.metric=",
            ),
        ),
        figure="auc",
        above=0.55,
    ),
    "stream": Planted(
        (
            *(
                "data.name=planted",
                "loader.batch_size=512",
                "train.epochs=3",
                "model.embedding_std=0.1",
            ),
            *(
                "optimizer.tables_lr=0.1",
                "optimizer.dense_lr=0.01",
                "train.early_stop.metric=",
            ),
        ),
        figure="auc",
        above=0.55,
    ),
    "bst": Planted(
        (
            *(
                "data.name=planted",
                "data.ranked=40",
                "loader.batch_size=256",
                "train.epochs=3",
                "model.top_widths=64",
            ),
            # At higher rates than the recipe's own the transformer, normalised last,
            # does not begin to learn.
            *(
                "model.embedding_dim=16",
                "model.heads=2",
                "model.dropout=0",
                "train.early_stop.metric=",
            ),
        ),
        figure="auc",
        above=0.55,
    ),
    "multi_task": Planted(
        (
            *(
                "data.name=planted",
                "data.ranked=200",
                "loader.batch_size=256",
                "train.epochs=3",
            ),
            *(
                "model.embedding_std=0.1",
                "optimizer.tables_lr=0.1",
                "optimizer.dense_lr=0.01",
            ),
        ),
        figure="conversion_auc",
        above=0.55,
    ),
    "session": Planted(
        (
            *(
                "data.name=planted",
                "data.users=600",
                "data.items=100",
                "model.embedding_dim=16",
                "model.hidden=32",
            ),
            *("train.epochs=4", "loader.batch_size=64", "train.early_stop.metric="),
        ),
        above=0.2,
    ),
}
_ON_LABELLED = ("contextual_ncf", "n_tower")
# What makes an interaction a product, and rows of it positives alone, for a softmax
# over shared candidates.
_PRODUCTS = {
    "session": "loader.negatives=0",
    "two_tower": "model.interaction=dot loader.negatives=0",
    "n_tower": "model.interaction=dot model.tower_widths=32",
    "stream": "model.interaction=dot train.epochs=6",
}
# Where no compiler has built its library, one rank says nothing of shared memory and
# two refuse it.
_SHARED = () if no_library() else ("collectives=shared_memory",)
# By option its choices, and the overrides that each stands for.
OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "amp": {"off": (), "bf16": ("train.amp=bf16",), "fp16": ("train.amp=fp16",)},
    "id_dropout": {"off": (), "on": ("id_dropout.{item}=0.1",)},
    "ids": {
        "static": (),
        "dynamic": (
            "ids.features.{item}.capacity=200 ids.features.{item}.admit_after=2 ids.every=2",
        ),
    },
    "sampling": {
        "recipe's": (),
        "popularity": ("loader.sampling=popularity",),
        "mixed": (
            "loader.sampling=mixed",
            "loader.negatives=0",
            "loader.shared_negatives=64",
        ),
    },
    "loss": {
        "recipe's": (),
        "bpr": ("model.loss=bpr",),
        "sampled_softmax": ("model.loss=sampled_softmax",),
        "in_batch": ("model.loss=in_batch", "{product}"),
        "catalogue": ("model.loss=catalogue", "{product}"),
    },
    "reject_known": {"off": (), "on": ("model.reject_known=true",)},
    "compile": {
        "off": ("train.compile=off",),
        "auto": ("train.compile=auto",),
        "require": ("train.compile=require",),
    },
    "rows_on": {"host": (), "cpu": ("loader.device=cpu",)},
    "drop_last": {"no": (), "yes": ("loader.drop_last=true",)},
    "early_stop": {
        "off": (),
        "on": (
            "train.early_stop.metric={figure}",
            "train.early_stop.patience=1",
            "train.eval_every=1",
        ),
        "last": (
            "train.early_stop.metric={figure}",
            "train.eval_every=1",
            "train.early_stop.restore=false",
        ),
    },
    "metrics": {"recipe's": (), "named": ("evaluation.metrics=hr@10,recall@20,map@5",)},
    "baselines": {"quick": (), "named": ("evaluation.baselines=popularity,ease",)},
    "sharding": {
        "auto": (),
        "table_wise": ("plan.sharding=table_wise",),
        "row_wise": ("plan.sharding=row_wise",),
        "table_row_wise": ("plan.sharding=table_row_wise",),
        "grid_shard": ("plan.sharding=grid_shard",),
        "data_parallel": ("plan.sharding=data_parallel",),
    },
    "kernel": {
        "auto": (),
        "fused": ("plan.kernel=fused",),
        "fused_uvm": ("plan.kernel=fused_uvm",),
    },
    "exchange": {
        "fp32": (),
        "fp16": ("plan.forward_precision=fp16", "plan.backward_precision=bf16"),
    },
    "sync": {
        "every_step": (),
        "local_sgd": ("sync.mode=local_sgd", "sync.every=4"),
        # In so few rounds the default outer momentum, .9, has not yet moved anything
        # far.
        "diloco": ("sync.mode=local_sgd", "sync.every=4", "sync.outer_momentum=0.3"),
    },
    "export": {"never": (), "auto": ("export=auto",), "require": ("export=require",)},
    "ranks": {"1": (), "2": ()},
    "collectives": {
        "auto": (),
        "gloo": ("collectives=gloo",),
        "shared_memory": _SHARED,
    },
    "towers": {
        "recipe's": (),
        "2": ("model.towers.user=user_id,weekday model.towers.item=item_id,hour",),
    },
    "share_items": {"no": (), "yes": ("model.share_items=true",)},
    "share_user": {"recipe's": (), "no": ("model.share_user=false",)},
    "out_of_range": {"error": (), "oov": ("model.out_of_range=oov",)},
    "history": {
        "recipe's": (),
        "1": ("data.history_length=1",),
        "0": ("data.history_length=0",),
    },
    "position": {"recipe's": (), "end": ("model.position=end",)},
    "combine": {"concat": (), "sum": ("model.combine=sum",)},
    "window": {"log's": (), "3": ("model.window=3",)},
    "saves": {
        "each epoch": (),
        "none": ("checkpoint.epochs=0",),
        "last": ("checkpoint.keep=1", "checkpoint.steps=3"),
        "elsewhere": ("checkpoint.folder={folder}/elsewhere",),
    },
    "start": {"drawn": (), "earlier": ("start.path={folder}/earlier",)},
    "reading": {"recipe's": (), "small": ("loader.lanes=3", "loader.buffer_rows=2048")},
    "weight": {"none": (), "column": ("loader.weight=weight",)},
}
# Recipes that have the keys of an option; the others refuse them by name.
ONLY = {
    "towers": ("n_tower", "stream", "multi_task"),
    "share_items": ("two_tower", "retrieval"),
    "share_user": ("two_tower", "retrieval", "ncf", "contextual_ncf"),
    "position": ("bst", "session"),
    "combine": ("bst",),
    "window": ("bst",),
}


class Refused(NamedTuple):
    """Choices that exclude each other, by option, and what the refusal says."""

    choices: Mapping[str, Sequence[str]]
    words: str

    def matches(self, cell: Cell) -> bool:
        return all(
            cell.get(option) in choices for option, choices in self.choices.items()
        )


_WAITING = r"train\.compile=require: the training step cannot be captured: 2 ranks wait for each other in every step"
_MEETING = r"train\.compile=require: the training step cannot be captured: ranks meet in every step"
_SCALED = r"train\.amp=fp16: table '\w+' is sharded, so its backward moves it"
_APART = {"ranks": ("2",), "sync": ("local_sgd", "diloco")}
_STREAMED = ("stream", "bst", "multi_task")
_OTHER_LOSSES = ("bpr", "sampled_softmax", "in_batch", "catalogue")
# their tables are sharded; no kernel moves Adam's on a CPU, so these are replicated
_ADAGRAD = ("two_tower", "retrieval", "session", *_STREAMED)
_REPLICATED = ("ncf", *_ON_LABELLED)
_BY_HOST = ("table_row_wise", "grid_shard")
REFUSED = [
    Refused(
        {"amp": ("fp16",), "sync": ("local_sgd", "diloco")},
        r"train\.amp=fp16 with sync\.mode=local_sgd",
    ),
    # A table that is sharded is moved inside the backward, where its gradient is still
    # scaled.
    Refused(
        {
            "amp": ("fp16",),
            "sharding": ("table_wise", "row_wise", "table_row_wise", "grid_shard"),
        },
        _SCALED,
    ),
    Refused({"amp": ("fp16",), "kernel": ("fused",)}, _SCALED),
    Refused(
        {"amp": ("fp16",), "compile": ("require",)},
        rf"{_SCALED}|train\.compile=require: .*=fp16 leaves out",
    ),
    Refused({"amp": ("fp16",), "exchange": ("fp16",), "ranks": ("2",)}, _SCALED),
    Refused({"amp": ("fp16",), "recipe": ("session", "bst")}, _SCALED),
    Refused(
        {"amp": ("fp16",), "recipe": _ADAGRAD, "sharding": ("auto",), "ranks": ("1",)},
        _SCALED,
    ),
    Refused(
        {
            "recipe": ("retrieval", *_ON_LABELLED, *_STREAMED),
            "sampling": ("popularity",),
        },
        r"loader\.sampling='popularity' with loader\.negatives=0: it would do nothing",
    ),
    Refused(
        {"recipe": ("session",), "sampling": ("popularity", "mixed")},
        r"loader\.sampling='(popularity|mixed)': candidates that all targets share are drawn uniformly",
    ),
    Refused(
        {"recipe": ("two_tower",), "sampling": ("mixed",), "loss": ("recipe's",)},
        r"loader\.negatives=0 without loader\.label: every row would have label 1",
    ),
    Refused(
        {
            "recipe": ("two_tower",),
            "sampling": ("mixed",),
            "loss": ("bpr", "sampled_softmax"),
        },
        r"model\.loss=(bpr|sampled_softmax) with loader\.negatives=0: ",
    ),
    Refused(
        {"recipe": ("ncf",), "sampling": ("mixed",)},
        r"loader\.negatives=0 without loader\.label: every row would have label 1",
    ),
    Refused(
        {"recipe": (*_ON_LABELLED, *_STREAMED), "sampling": ("mixed",)},
        r"loader\.label='(label|click)' with loader\.shared_negatives=64: drawn negatives have label 0",
    ),
    Refused(
        {"recipe": ("retrieval",), "loss": ("bpr", "sampled_softmax")},
        r"model\.loss=(bpr|sampled_softmax) with loader\.negatives=0: .*; set loader\.negatives to 1 or more",
    ),
    Refused(
        {"recipe": ("contextual_ncf",), "loss": ("bpr", "sampled_softmax")},
        r"model\.loss=(bpr|sampled_softmax) with loader\.label='label': .*; take model\.loss=bce",
    ),
    Refused(
        {"recipe": ("n_tower", "stream"), "loss": ("bpr", "sampled_softmax")},
        r"model\.loss=(bpr|sampled_softmax) with loader\.label='label': .*; take model\.loss=bce",
    ),
    Refused(
        {"recipe": ("ncf", "contextual_ncf"), "loss": ("in_batch", "catalogue")},
        r"model\.loss=(in_batch|catalogue): queries share candidates, and NeuMF runs",
    ),
    Refused(
        {"recipe": ("session",), "loss": ("bpr", "in_batch")},
        r"model\.loss=(bpr|in_batch): ",
    ),
    Refused(
        {
            "recipe": ("two_tower",),
            "reject_known": ("on",),
            "loss": ("recipe's", "bpr", "sampled_softmax"),
        },
        r"model\.reject_known=true with model\.loss=(bce|bpr|sampled_softmax): drawn negatives are never known",
    ),
    Refused(  # whichever loss would take the one refuses the other
        {
            "recipe": ("two_tower",),
            "reject_known": ("on",),
            "sampling": ("popularity",),
        },
        r"model\.reject_known=true with model\.loss=bce: drawn negatives are never known",
    ),
    Refused(
        {
            "recipe": ("two_tower", "retrieval"),
            "reject_known": ("on",),
            "loss": ("catalogue",),
        },
        r"model\.reject_known=true with model\.loss=catalogue: the softmax is over all items",
    ),
    Refused(
        {
            "recipe": ("two_tower",),
            "sampling": ("popularity",),
            "loss": ("in_batch", "catalogue"),
        },
        r"loader\.sampling='popularity' with loader\.negatives=0: it would do nothing",
    ),
    Refused(
        {
            "recipe": ("two_tower", "retrieval"),
            "sampling": ("mixed",),
            "loss": ("catalogue",),
        },
        r"loader\.shared_negatives=64, loader\.device=\w+ with a loss over the catalogue",
    ),
    Refused(
        {
            "recipe": ("two_tower", "retrieval", "stream"),
            "rows_on": ("cpu",),
            "loss": ("catalogue",),
        },
        r"loader\.device='cpu' with a loss over the catalogue",
    ),
    Refused(
        {"recipe": ("bst",), "loss": _OTHER_LOSSES},
        r"Unrecognized options: --model\.loss",
    ),
    Refused(
        {"recipe": ("multi_task",), "loss": _OTHER_LOSSES},
        r"model\.loss=(bpr|sampled_softmax|in_batch|catalogue)",
    ),
    Refused(
        {
            "recipe": ("ncf", *_ON_LABELLED, "session", *_STREAMED),
            "reject_known": ("on",),
        },
        r"Unrecognized options: --model\.reject_known, true",
    ),
    Refused(
        {"recipe": _ON_LABELLED, "metrics": ("named",)},
        r"evaluation\.metrics=hr@10,recall@20,map@5: the catalogue of 'planted' is not ranked",
    ),
    Refused(
        {"recipe": _ON_LABELLED, "baselines": ("named",)},
        r"evaluation\.baselines=popularity,ease: the catalogue of 'planted' is not ranked",
    ),
    Refused(
        {"recipe": ("session",), "ids": ("dynamic",)},
        r"ids\.features\.session: sessions have no dynamic ids; leave it out",
    ),
    Refused(
        {"ids": ("dynamic",), "sync": ("local_sgd", "diloco")},
        r"sync\.mode=local_sgd with ids\.features\.(item_id|session): a row begins anew on all ranks",
    ),
    Refused(
        {"ids": ("dynamic",), "id_dropout": ("on",)},
        r"id_dropout\.\w+ with ids\.features\.\w+: admit_after=2 trains",
    ),
    Refused(
        {"ids": ("dynamic",), "rows_on": ("cpu",)},
        r"loader\.device=cpu with ids\.features\.\w+: ids are mapped to rows",
    ),
    Refused(
        {"ids": ("dynamic",), "early_stop": ("on",)},
        r"train\.early_stop\.metric=\S+ with ids\.features\.\w+: other ids have the rows by the last step",
    ),
    Refused(
        {
            "ids": ("dynamic",),
            "loss": ("catalogue",),
            "recipe": ("two_tower", "retrieval", "stream"),
        },
        r"model\.loss=catalogue with ids\.features\.item_id: every step reads all items",
    ),
    Refused(
        {"recipe": ("session",), "id_dropout": ("on",)},
        r"id_dropout=session=0\.1 with a SessionLoader: ",
    ),
    Refused(
        {"recipe": ("session",), "rows_on": ("cpu",)},
        r"loader\.device='cpu': sequences are dealt out on the host",
    ),
    Refused(
        {"sampling": ("mixed",), "rows_on": ("cpu",)},
        r"loader\.device='cpu' with loader\.sampling='mixed': ",
    ),
    Refused(
        {"compile": ("require",), "ranks": ("2",), "sync": ("every_step",)}, _WAITING
    ),
    # An exchange that is quantised is one that there is: tables that are free are
    # sharded.
    Refused(
        {"compile": ("require",), "ranks": ("2",), "exchange": ("fp16",)}, _WAITING
    ),
    Refused(
        {
            "compile": ("require",),
            "ranks": ("2",),
            "sharding": ("table_wise", "row_wise", *_BY_HOST),
        },
        _WAITING,
    ),
    Refused(
        {
            "compile": ("require",),
            "ranks": ("2",),
            "sharding": ("auto",),
            "recipe": _ADAGRAD,
        },
        _WAITING,
    ),
    Refused(
        {
            "compile": ("require",),
            **_APART,
            "recipe": ("retrieval",),
            "sharding": ("data_parallel",),
        },
        _MEETING,
    ),
    Refused(
        {
            "recipe": ("two_tower", "retrieval", "stream"),
            "loss": ("catalogue",),
            **_APART,
        },
        r"sync\.mode=local_sgd with model\.loss=catalogue: item towers drift apart between exchanges",
    ),
    # The rows with a click, and the columns of the catalogue that are a row's own item,
    # are counted in each step.
    Refused(
        {
            "compile": ("require",),
            "recipe": ("n_tower", "stream"),
            "loss": ("in_batch",),
        },
        r"train\.compile=require: the training step cannot be captured: ",
    ),
    Refused(
        {
            "compile": ("require",),
            "recipe": ("two_tower", "retrieval", "stream"),
            "loss": ("catalogue",),
        },
        r"train\.compile=require: the training step cannot be captured: ",
    ),
    Refused(
        {"compile": ("require",), "recipe": ("session", "bst")},
        r"' returns a row for each id, so its",
    ),
    Refused(
        {"sharding": ("data_parallel",), "recipe": ("session", "bst")},
        r"data_parallel on a cpu: it is read id by id",
    ),
    Refused(
        {"sharding": ("table_row_wise", "grid_shard"), "recipe": ("session", "bst")},
        r"(table_row_wise|grid_shard): it is read id by id, which TorchRec shards table_wise, row_wise or column_wise",
    ),
    Refused(
        {"kernel": ("fused_uvm",)},
        r"kernel=fused_uvm on a cpu: its rows would lie beside a GPU's memory",
    ),
    Refused(
        {"kernel": ("fused",), "sharding": ("data_parallel",)},
        r"kernel=fused with data_parallel: each rank has",
    ),
    Refused(
        {"kernel": ("fused",), "sharding": ("auto",), "recipe": _REPLICATED},
        r"kernel=fused with data_parallel: each",
    ),
    Refused(
        {"exchange": ("fp16",), "ranks": ("2",), "sharding": ("data_parallel",)},
        r"plan\.forward_precision=fp16, plan\.backward_precision=bf16: every table is data_parallel, so ranks exchange",
    ),
]
REFUSED += [
    Refused(
        {"recipe": ("two_tower", "retrieval", "ncf"), "weight": ("column",)},
        r"column 'weight' is missing",
    ),
    Refused(
        {"recipe": ("session",), "weight": ("column",)},
        r"loader\.weight='weight': sequences have no such",
    ),
    Refused(
        {"recipe": ("stream",), "towers": ("2",), "metrics": ("named",)},
        r"evaluation\.metrics=hr@10,recall@20,map@5: the catalogue of 'planted' is not ranked",
    ),
    Refused(
        {"recipe": ("stream",), "towers": ("2",), "baselines": ("named",)},
        r"evaluation\.baselines=popularity,ease: the catalogue of 'planted' is not ranked",
    ),
    Refused(
        {"recipe": ("multi_task",), "towers": ("2",)},
        r"model\.towers: tower 'user' names 'weekday', which no column is",
    ),
    Refused(
        {"recipe": ("stream",), "towers": ("2",), "loss": ("catalogue",)},
        r"model\.loss=catalogue with model\.towers: the last tower, 'item', reads column 'hour'",
    ),
    Refused(
        {"recipe": ("n_tower", "stream"), "towers": ("2",), "export": ("require",)},
        r"export=require: a bundle stores the vectors of an item tower",
    ),
]
REFUSED += [
    Refused(
        {
            "recipe": tuple(name for name in RECIPES if name not in recipes),
            option: tuple(OPTIONS[option])[1:],
        },
        r"Unrecognized options: --",
    )
    for option, recipes in ONLY.items()
]


def cells(n: int, **narrowed: tuple[str, ...]) -> list[dict[str, str]]:
    """Returns cells that run, in which all choices of any ``n`` options meet; ``narrowed`` restricts options."""
    choices = (
        {"recipe": tuple(recipes.RECIPES)}
        | {name: tuple(choice) for name, choice in OPTIONS.items()}
        | narrowed
    )
    excluded = [
        {
            "operator": "not",
            "condition": {
                "operator": "and",
                "conditions": [
                    {"operator": "in", "left": name, "values": list(of)}
                    for name, of in refused.choices.items()
                ],
            },
        }
        for refused in REFUSED
    ]
    made: list[dict[str, str]] = make(choices, strength=n, constraints=excluded)
    return made


def name_of(cell: Cell) -> str:
    """The recipe, and every choice but each option's first."""
    chosen = [
        f"{name}={cell[name]}"
        for name, choices in OPTIONS.items()
        if cell[name] != next(iter(choices))
    ]
    return "-".join([cell["recipe"], *chosen])


def overrides_of(cell: Cell, folder: Path) -> list[str]:
    recipe = RECIPES[cell["recipe"]]
    item = "session" if cell["recipe"] == "session" else "item_id"
    table = "item_id_gmf" if cell["recipe"] in ("ncf", "contextual_ncf") else "item_id"
    product = _PRODUCTS.get(cell["recipe"], "threads=1")
    chosen = [
        override
        for name, choices in OPTIONS.items()
        for override in choices[cell[name]]
    ]
    names = {
        "figure": recipe.figure,
        "item": item,
        "table": table,
        "product": product,
        "folder": str(folder),
    }
    return [
        *recipe.overrides,
        *(override for group in chosen for override in group.format(**names).split()),
    ]


class Outcome(NamedTuple):
    """What a rank saw of a run: its refusal or None, its steps, test figures, and on rank 0 the bundle's scores."""

    refusal: str | None
    steps: int
    figures: dict[str, float]
    scores: list[float] | None
    output: str


def trained(runtime: Runtime, cells: Sequence[Cell], folder: Path) -> list[Outcome]:
    """The outcomes of several cells, one after another: most of the time of a refused one is what a process imports."""
    ports = iter(leave_group(runtime, groups=2 * len(cells)))
    planted.planted_log_folder = written_once(
        planted.planted_log_folder, folder / f"logs{runtime.rank}"
    )
    outcomes = []
    for number, cell in enumerate(cells):
        try:
            outcomes.append(outcome_of(runtime, cell, folder / str(number), ports))
        except Exception as error:
            raise AssertionError(name_of(cell)) from error
    return outcomes


def written_once(
    write: Callable[..., dict[str, float]], kept: Path
) -> Callable[..., dict[str, float]]:
    """``write``, which takes two seconds, for each of its arguments once; from then on the folder is copied."""
    made: dict[str, tuple[Path, dict[str, float]]] = {}

    def copied(folder: Path, **options: Any) -> dict[str, float]:
        name = "-".join(f"{key}={value}" for key, value in sorted(options.items()))
        if name not in made:
            (kept / name).mkdir(parents=True)
            made[name] = kept / name, write(kept / name, **options)
        shutil.copytree(made[name][0], folder, dirs_exist_ok=True)
        return made[name][1]

    return copied


def outcome_of(
    runtime: Runtime, cell: Cell, folder: Path, ports: Iterator[int]
) -> Outcome:
    def train(settings: Sequence[str], folder: Path) -> None:
        os.environ["MASTER_PORT"] = str(next(ports))
        run_training(with_settings(load_recipe(cell["recipe"]), list(settings)), folder)

    output, refusal = io.StringIO(), None
    with contextlib.redirect_stdout(output):
        try:
            if cell["start"] == "earlier":
                # a run that saves, of the same tables and layers
                earlier = overrides_of(
                    {
                        **cell,
                        "start": "drawn",
                        "saves": "each epoch",
                        "export": "never",
                    },
                    folder,
                )
                train([*earlier, "train.epochs=1"], folder / "earlier")
            train(overrides_of(cell, folder), folder)
        except ValueError as error:
            refusal = str(error)
    log, summary = folder / "metrics.jsonl", folder / "summary.json"
    records: list[dict[str, Any]] = (
        [json.loads(line) for line in log.read_text().splitlines()]
        if log.exists()
        else []
    )
    steps = max(
        (record["step"] for record in records if record["kind"] == "train"), default=0
    )
    figures = json.loads(summary.read_text())["test"] if summary.exists() else {}
    scores = (
        answered(folder / "bundle")
        if runtime.is_main and (folder / "bundle").exists()
        else None
    )
    return Outcome(refusal, steps, figures, scores, output.getvalue())


def audited(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Raw columns of the first audited request."""
    rows = read_table(folder / AUDIT).slice(0, 1).select(sorted(names))
    return rows.to_pylist()[0]  # type: ignore[no-any-return]


def answered(folder: Path) -> list[float]:
    """Returns the scores of five recommendations to the bundle's first user, in the context of an audited request."""
    bundle = Bundle.load(folder)
    if bundle.users is None:
        request = audited(folder, bundle.query.columns.raw)
        return Scorer(bundle).recommend(RecommendRequest(user=request, k=5)).scores
    (known,) = bundle.users.ids.ids([0])
    needed = set(bundle.query.columns.raw) - set(bundle.users.block(0, 1).schema.names)
    context = audited(folder, needed)
    return (
        Scorer(bundle)
        .recommend(RecommendRequest(user={**context, bundle.users.key: known}, k=5))
        .scores
    )


def outcomes_of(
    cells: Sequence[Cell], *, timeout_s: float = 300
) -> list[list[Outcome]]:
    """By cell the outcome of each rank; the cells have one number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        by_rank: list[list[Outcome]] = run_ranks(
            trained, int(cells[0]["ranks"]), cells, Path(folder), timeout_s=timeout_s
        )
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


def learns_little(cell: Cell) -> bool:
    """Whether options meet that each slow learning: what a few steps then learn is close to chance."""
    slow = [("id_dropout", "on")]
    return (
        sum(cell[name] == choice for name, choice in slow)
        + (cell["loss"] != "recipe's")
        > 2
    )


def check_runs(cell: Cell, outcomes: Sequence[Outcome]) -> None:
    """One cell of the matrix that must run."""
    assert [outcome.refusal for outcome in outcomes] == [None] * len(outcomes)
    first, recipe = outcomes[0], RECIPES[cell["recipe"]]
    assert all(math.isfinite(value) for value in first.figures.values()), first.figures
    assert learns_little(cell) or first.figures[recipe.figure] > recipe.above, (
        first.figures
    )
    if cell["export"] == "auto" and cell["towers"] == "2":
        assert "no bundle: " in first.output, first.output
    elif cell["export"] != "never":
        assert first.scores is not None, first.output
        assert len(first.scores) == 5
        assert all(map(math.isfinite, first.scores))
        assert first.scores == sorted(first.scores, reverse=True)


def outcomes_by_name(
    cells: Sequence[Cell], seconds_each: float
) -> dict[str, list[Outcome]]:
    """The outcomes of cells by their names; ranks are started once for each number of them."""
    made = {}
    for ranks in sorted({cell["ranks"] for cell in cells}):
        chosen = [cell for cell in cells if cell["ranks"] == ranks]
        outcomes = outcomes_of(chosen, timeout_s=60 + seconds_each * len(chosen))
        made |= dict(zip(map(name_of, chosen), outcomes, strict=True))
    return made


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[Outcome]]:
    """The outcomes of all cells that this run tries."""
    items: list[Any] = [
        item
        for item in request.session.items
        if "outcomes" in getattr(item, "fixturenames", ())
    ]
    tried = {
        name_of(cell): cell for cell in (item.callspec.params["cell"] for item in items)
    }
    return outcomes_by_name([*tried.values()], 30)


@functools.cache
def drawn_cells(n: int, count: int) -> list[dict[str, str]]:
    """Returns ``count`` cells that run, always the same ones, in which many choices of ``n`` options meet.

    Each is the one of some that are drawn in which most meet for the first time. To find cells in which all choices of
    two options meet takes half a minute, and of three hours.
    """
    # A seed whose first cells hold every choice, and few of the recipes that train for
    # long, bst and stream.
    draw, seen = random.Random(149), set[tuple[tuple[str, str], ...]]()
    choices = {"recipe": tuple(RECIPES)} | {
        name: tuple(of) for name, of in OPTIONS.items()
    }
    # It compiles for ten seconds and more.
    choices["compile"] = tuple(each for each in choices["compile"] if each != "require")
    refusals = {
        name: [refused for refused in REFUSED if name in refused.choices]
        for name in OPTIONS
    }

    def runs() -> dict[str, str]:
        cell = {"recipe": draw.choice(choices["recipe"])}
        for name in draw.sample(list(OPTIONS), len(OPTIONS)):
            free = [
                each
                for each in choices[name]
                if not any(of.matches({**cell, name: each}) for of in refusals[name])
            ]
            if not free:
                return runs()
            cell[name] = draw.choice(free)
        return {name: cell[name] for name in choices}

    def new(cell: Cell, size: int = n) -> set[tuple[tuple[str, str], ...]]:
        return set(itertools.combinations(cell.items(), size)) - seen

    made = []
    for _ in range(count):
        made.append(
            max(
                (runs() for _ in range(30)),
                key=lambda cell: (len(new(cell, 1)), len(new(cell))),
            )
        )
        seen |= new(made[-1], 1) | new(made[-1])
    return made


DEFAULT = 12  # cells of the default run: the fewest that hold every choice, 80 seconds of a core
PAIRS = 36  # with those of the slow run
TRIPLES = 90
PAIR_CELLS = [
    pytest.param(
        cell, id=name_of(cell), marks=pytest.mark.slow if number >= DEFAULT else ()
    )
    for number, cell in enumerate(drawn_cells(2, PAIRS))
]


@pytest.mark.parametrize("cell", PAIR_CELLS)
def test_options_work_two_by_two(
    cell: Cell, outcomes: dict[str, list[Outcome]]
) -> None:
    check_runs(cell, outcomes[name_of(cell)])


@pytest.mark.unit
def test_the_default_run_tries_each_choice_that_runs() -> None:
    tried = drawn_cells(2, PAIRS)[:DEFAULT]
    slow = {("compile", "require")}
    excluded = {
        (name, *of)
        for refused in REFUSED
        if len(refused.choices) == 1
        for name, of in refused.choices.items()
    }
    for name, choices in OPTIONS.items():
        missing = {(name, each) for each in choices} - {
            (name, cell[name]) for cell in tried
        }
        assert missing <= slow | excluded, missing
    assert {cell["recipe"] for cell in tried} == RECIPES.keys()


@pytest.mark.slow(minutes=3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_any_two_options_work_together(recipe: str) -> None:
    assert_all_run([cell for cell in cells(2) if cell["recipe"] == recipe])


def assert_all_run(tried: Sequence[Cell]) -> None:
    failed, outcomes = {}, outcomes_by_name(tried, 300)
    for cell in tried:
        made = outcomes[name_of(cell)]
        try:
            check_runs(cell, made)
        except AssertionError as error:
            failed[name_of(cell)] = (str(error), [outcome.refusal for outcome in made])
    assert not failed


@pytest.mark.slow(minutes=3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_three_options_work_together(recipe: str) -> None:
    assert_all_run(
        [cell for cell in drawn_cells(3, TRIPLES) if cell["recipe"] == recipe]
    )


def refused_cells() -> Iterator[Any]:
    """Yields every cell that a refusal excludes, all else plain; the default run tries each choice once."""
    plain = {"recipe": "two_tower"} | {
        name: next(iter(choices)) for name, choices in OPTIONS.items()
    }
    for refused in REFUSED:
        longest = max(map(len, refused.choices.values()))
        once = {
            tuple(of[index % len(of)] for of in refused.choices.values())
            for index in range(longest)
        }
        for values in itertools.product(*refused.choices.values()):
            cell = plain | dict(zip(refused.choices, values, strict=True))
            yield pytest.param(
                cell,
                refused.words,
                id=name_of(cell),
                marks=() if values in once else pytest.mark.slow,
            )


@pytest.mark.parametrize(("cell", "words"), list(refused_cells()))
def test_what_excludes_each_other_is_refused_by_name_before_the_first_step(
    cell: Cell, words: str, outcomes: dict[str, list[Outcome]]
) -> None:
    for outcome in outcomes[name_of(cell)]:
        assert outcome.refusal is not None
        assert re.search(words, outcome.refusal), outcome.refusal
        assert outcome.steps == 0
        assert not outcome.figures


@pytest.mark.unit
def test_no_recipe_is_left_out() -> None:
    assert RECIPES.keys() == recipes.RECIPES.keys()


@pytest.mark.slow  # the pairs are found in 20 s
def test_every_pair_of_choices_is_tried_or_refused() -> None:
    choices = {"recipe": tuple(RECIPES)} | {
        name: tuple(of) for name, of in OPTIONS.items()
    }
    tried = cells(2)
    for first, second in itertools.combinations(choices, 2):
        for pair in itertools.product(choices[first], choices[second]):
            chosen = {first: pair[0], second: pair[1]}
            somewhere = (
                [chosen]
                if "recipe" in chosen
                else [{**chosen, "recipe": recipe} for recipe in RECIPES]
            )
            refused = all(
                any(refused.matches(cell) for refused in REFUSED) for cell in somewhere
            )
            assert refused != any(chosen.items() <= cell.items() for cell in tried), (
                chosen
            )
    assert not [cell for cell in tried for refused in REFUSED if refused.matches(cell)]
