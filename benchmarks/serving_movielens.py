"""Approximate search among vectors that were trained: MovieLens 1M's films, asked by its users' vectors.

The recipe `retrieval` (towers of 64 under a softmax over the batch, ranked by their product) is trained for two epochs,
some two minutes, and exported once for each kind of index, as a user would. A study, which runs where --only names it;
without the set in TORCHREC_EXT_DATA it is left out.

3,706 films are few: FAISS's own exact search takes some 40 us for one user, so that an index which costs nothing would
still be less than 5 times as fast beside what a call takes in Python. A catalogue of 200,000 is made of them by the
trained tower itself: each item is the id of one film with the year and the genres of another, pairs drawn without
repetition, so that every value is real and nothing is noise. These vectors are no easier to search than the films' own:
of both, distances to the nearest 20 say so (Levina and Bickel 2004: 7.0 dimensions where the films have 5.3).

Recall is of users that neither chose the setting nor measured it at the build.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import torch
from harness import LIMIT_S, ROOT, Options, Row, calls_in_turn, has_data
from serving import compared
from torch import Tensor

from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.exporting.content import INDEX_QUERIES
from torchrec_ext.retrieval.index.exact import ExactIndex, Index
from torchrec_ext.retrieval.index.faiss import FaissIndex
from torchx_apps.recipes.saved_job import saved_job

DATA = "ml-1m-ncf"
KINDS = ("ivf", "hnsw", "pq")
LARGE = 200_000
JUDGED = 1_000  # users by whom recall is measured


def films(options: Options) -> Iterator[Row]:
    """Top 100 and top 10 for one user and for 64 at a time: exact against each kind, at recall 0.95 of the top 100."""
    if not (options.quick or has_data("movielens", DATA)):
        return
    run = _trained(options.quick)
    bundles = {kind: Bundle.load(_exported(run, kind)) for kind in ("exact", *KINDS)}
    _, users = _users(bundles["exact"])
    rows = bundles["exact"].store.matrix()
    kinds = {kind: bundles[kind].index for kind in KINDS}
    yield from _rows(f"{len(rows):,} films", rows, kinds, users, options.turns)


def recombined(options: Options) -> Iterator[Row]:
    """Times searches of the large catalogue, each kind as an export of it would build it."""
    if not (options.quick or has_data("movielens-large", DATA)):
        return
    run = _trained(options.quick)
    bundle = Bundle.load(_exported(run, "exact"))
    asked, users = _users(bundle)
    rows = _recombined(run, bundle, 20_000 if options.quick else LARGE)
    kinds: dict[str, Index] = {
        kind: FaissIndex.build(rows, "dot", kind=kind, recall=0.95, queries=asked)
        for kind in KINDS
    }
    yield from _rows(
        f"{len(rows):,} recombined films", rows, kinds, users, options.turns
    )


def _rows(
    name: str, rows: Tensor, kinds: dict[str, Index], users: Tensor, turns: int
) -> Iterator[Row]:
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    exact, flat = ExactIndex(rows, "dot"), faiss.IndexFlatIP(rows.shape[1])
    exact.quantize()  # as it is served
    flat.add(rows.numpy())
    for k in (100, 10):
        truth = exact.search(users[:JUDGED], k)[1]
        recall = {
            kind: _recall(truth, index.search(users[:JUDGED], k)[1])
            for kind, index in kinds.items()
        }
        for batch in (1, 64):
            sides: dict[str, Any] = {"exact": exact, **kinds}
            calls = {
                side: partial(_search, index, users, batch, k)
                for side, index in sides.items()
            }
            calls["faiss flat"] = lambda number, batch=batch, k=k: flat.search(
                _some(users, batch, number).numpy(), k
            )
            times = calls_in_turn(calls, turns, 100 if batch == 1 else 10)
            for kind, index in kinds.items():
                title = f"approximate, {kind}, top {k} of {name}, {batch} at a time"
                yield compared(
                    title,
                    times["exact"],
                    times[kind],
                    5.0 if (k, batch) == (100, 1) else None,
                    faiss_flat=round(1e3 * float(np.median(times["faiss flat"])), 4),
                    recall=round(recall[kind], 4),
                    recall_at_build=round(index.measured_recall, 4),
                    setting=index.setting,
                    lifted=index.lifted,
                )


def _search(index: Index, users: Tensor, batch: int, k: int, number: int) -> None:
    index.search(_some(users, batch, number), k)


def _some(users: Tensor, batch: int, number: int) -> Tensor:
    """Returns (batch, D) users, others at each call."""
    first = number * batch % (len(users) - batch)
    return users[first : first + batch]


def _recall(truth: Tensor, result: Tensor) -> float:
    return float((truth[:, :, None] == result[:, None, :]).any(dim=2).float().mean())


def _users(bundle: Bundle) -> tuple[Tensor, Tensor]:
    """Vectors of the users by whom the export has tuned and measured, and of all others in a random order."""
    assert bundle.users is not None
    count = len(bundle.users.ids)
    asked = np.linspace(0, count - 1, INDEX_QUERIES).round().astype(np.int64)
    others = np.random.default_rng(0).permutation(np.setdiff1d(np.arange(count), asked))
    rows = [bundle.users.rows(places) for places in (asked, others)]
    first, second = (
        bundle.embed_query({name: list(column) for name, column in some.items()})
        for some in rows
    )
    return first, second


def _recombined(run: Path, bundle: Bundle, count: int) -> Tensor:
    """(count, D) by the trained tower: each the id of one film with all else of another."""
    job = saved_job(run)
    task = job.task(job.data, progress=False)
    schema = job.build(job.model, task.data).schema(out_of_range=job.model.out_of_range)
    films = task.export_data(schema).catalogue.features
    pairs = np.random.default_rng(0).choice(len(films) ** 2, count, replace=False)
    rows = films.take(pa.array(pairs // len(films)))
    ids = films["item_id"].take(pa.array(pairs % len(films)))
    rows = rows.set_column(rows.column_names.index("item_id"), "item_id", ids)
    blocks = [rows.slice(start, 4096).to_pydict() for start in range(0, count, 4096)]
    return torch.cat([bundle.embed_candidates(block) for block in blocks])


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@cache
def _trained(quick: bool) -> Path:
    """The run folder, which lasts as long as this process: a run that is kept may be of other code."""
    run = Path(_folder().name) / "run"
    data = (
        ("data.name=planted", "data.users=1500", "data.items=3000")
        if quick
        else (f"data.name={DATA}",)
    )
    settings = [*data, "train.epochs=2", "train.eval_every=2"]
    flags = [flag for setting in settings for flag in ("--set", setting)]
    _run("torchx_apps.train", "--recipe", "retrieval", "--run-dir", str(run), *flags)
    return run


def _exported(run: Path, kind: str) -> Path:
    out = run / f"bundle-{kind}"
    if not out.exists():
        _run(
            "torchx_apps.export",
            str(run),
            "--out",
            str(out),
            "--index",
            kind,
            "--recall",
            "0.95",
        )
    return out


def _run(module: str, *flags: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *flags]
    subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        check=True,
        stdout=sys.stderr,
        timeout=3 * LIMIT_S,
    )
