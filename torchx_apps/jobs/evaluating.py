"""run_evaluation(): reads vectors and pairs, ranks the catalogue for each user, and tells the figures."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from torchrec_ext.data.datasets.features import check_no_null, raw_ids, spelled
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.drawing.figures import (
    BLUE,
    RED,
    figure_with_panels,
    require_matplotlib,
    save_figure,
)
from torchrec_ext.drawing.terminal import terminal
from torchrec_ext.schema import DataError
from torchrec_ext.train import metrics
from torchrec_ext.train.checkpoint.vectors import BLOCK, read_vectors
from torchrec_ext.train.config import EvaluationConfig, Figure
from torchx_apps.cli.command_line import write_out
from torchx_apps.jobs.tracking import tracked

_SPELLINGS = {"user": ("user", "user_id"), "item": ("item", "item_id")}
# the number of queries ranked so far, and those of a block
Ranked = Iterator[tuple[int, metrics.TargetRanks]]
# Ranks per update of the figures.
_TOGETHER = 2**18
_CURVE = (1, 2, 5, 10, 20, 50, 100)
_Ids = np.ndarray[Any, np.dtype[Any]]


class Vectors(NamedTuple):
    """Ids (N,), ascending, and their vectors (N, D) float32, of a file."""

    path: Path
    ids: _Ids
    vectors: Tensor

    def rows(self, ids: _Ids) -> _Ids:
        """Returns the row of each id, (M,); -1 for an id without a vector."""
        if self.ids.dtype.kind == "i":
            first = self.ids[0]
            last = self.ids[-1]
            # Ids without a gap need no search.
            if last - first == len(self.ids) - 1:
                return np.where((ids >= first) & (ids <= last), ids - first, -1)
        # searchsorted() gives one row too many for an id beyond the last.
        index = np.minimum(self.ids.searchsorted(ids), len(self.ids) - 1)
        return np.where(self.ids[index] == ids, index, -1)


class Queries(NamedTuple):
    """The rows of users with an item to find, (Q,), their question, and the pairs with an item without a vector.

    ``missed`` are the rows of the users of these pairs, ascending: such an item is found by no ranking. ``popularity``
    (I,) counts the seen pairs of each item, also of users who are not asked; None without seen pairs.
    """

    users: _Ids
    question: metrics.Question
    missed: _Ids
    popularity: Tensor | None = None

    def with_missed(
        self, ranks: metrics.TargetRanks, start: int, stop: int, behind: int
    ) -> metrics.TargetRanks:
        """Returns the ranks of a block of queries, with items without a vector ranked last."""
        queries = self.users.searchsorted(self.missed)
        is_query = self.users[np.minimum(queries, len(self.users) - 1)] == self.missed
        queries = queries[is_query & (queries >= start) & (queries < stop)]
        return _joined(ranks, torch.from_numpy(queries), behind)

    def lost(self, behind: int) -> metrics.TargetRanks | None:
        """Returns the ranks of users without a vector for any of their items; None if there is no such user."""
        users = self.missed[~np.isin(self.missed, self.users)]
        if not len(users):
            return None
        none = torch.zeros(0, dtype=torch.int64)
        return _joined(
            metrics.TargetRanks(none, none, none), torch.from_numpy(users), behind
        )


def _joined(
    ranks: metrics.TargetRanks, queries: Tensor, behind: int
) -> metrics.TargetRanks:
    assert ranks.queries is not None
    added = torch.zeros(len(queries), dtype=torch.int64)
    order = torch.cat([ranks.queries, queries]).sort(stable=True)
    better = torch.cat([ranks.better, added + behind])
    ties = torch.cat([ranks.ties, added])
    return metrics.TargetRanks(better[order.indices], ties[order.indices], order.values)


def run_evaluation(options: argparse.Namespace) -> int:
    """Prints the figures requested by the flags of ``rec.evaluate``, and writes them to ``--out``.

    Returns:
        0.

    Raises:
        ValueError: a flag is wrong.
        DataError: a file does not hold what it should.
    """
    requested_figures = EvaluationConfig(
        metrics=tuple(options.metrics.split(","))
    ).figures
    if options.out:
        require_matplotlib("leave out --out")
    with tracked(options.out, vars(options), folder="figures") as tracked_figures:
        report, curve = _evaluated(options, requested_figures)
        print(json.dumps(report) if options.json else _text(report))
        if options.out:
            _write(options.out, report, curve)
        tracked_figures.update(report)
    return 0


def _evaluated(
    options: argparse.Namespace, requested_figures: Sequence[tuple[Figure, int]]
) -> tuple[dict[str, Any], list[tuple[int, float, float | None]]]:
    """Returns the report, and for a picture recall by K of the vectors and of the most popular items."""
    users = _vectors(options.users)
    items = _vectors(options.items)
    if users.vectors.shape[1] != items.vectors.shape[1]:
        raise DataError(
            f"{options.users}: vectors are {users.vectors.shape[1]} wide, and those of {options.items} "
            f"{items.vectors.shape[1]}; give vectors of one model"
        )
    queries = _queries_of(options, users, items)
    names: list[Figure] = sorted({name for name, _ in requested_figures})
    numbers = {k for _, k in requested_figures}
    if options.out:
        # The picture draws recall by K.
        numbers |= set(_CURVE)
        if "recall" not in names:
            names.append("recall")
    ks = sorted(numbers)
    # An item without a vector is behind every item, and is shown at no K.
    behind = max(len(items.ids), *ks)
    figures = _figures(
        queries,
        _ranked(queries, users, items, options.similarity, max(ks)),
        ks,
        names,
        behind,
    )
    baseline = _popularity(queries, ks, names, behind)
    labels = [f"{name}@{k}" for name, k in requested_figures]
    report = {
        "users": len(np.union1d(queries.users, queries.missed)),
        "items": len(items.ids),
        "pairs": len(queries.question.targets) + len(queries.missed),
        "pairs_whose_item_has_no_vector": len(queries.missed),
        "pairs_seen_before": int(queries.question.repeats.sum()),
        "similarity": options.similarity,
        "figures": {name: figures[name] for name in labels},
        "popularity": {name: baseline[name] for name in labels if name in baseline},
    }
    if not options.out:
        return report, []
    return report, [
        (k, figures[f"recall@{k}"], baseline.get(f"recall@{k}")) for k in ks
    ]


def _ranked(
    queries: Queries,
    users: Vectors,
    items: Vectors,
    similarity: metrics.Similarity,
    depth: int,
) -> Ranked:
    line = terminal()
    with tqdm(
        total=len(queries.users),
        unit="user",
        file=line,
        disable=line is None,
        dynamic_ncols=True,
    ) as bar:
        query_vectors = users.vectors[torch.from_numpy(queries.users)]
        for stop, ranks in metrics.vector_ranks(
            query_vectors,
            items.vectors,
            queries.question,
            similarity=similarity,
            depth=depth,
        ):
            yield stop, ranks
            bar.update(stop - bar.n)


def _popularity(
    queries: Queries, ks: list[int], names: list[Figure], behind: int
) -> dict[str, float]:
    """Returns the figures of the ranking by how often an item was seen; none without seen pairs."""
    if queries.popularity is None:
        return {}
    ranks = metrics.popularity_ranks(queries.popularity, queries.question)
    return _figures(queries, iter([(len(queries.users), ranks)]), ks, names, behind)


def _figures(
    queries: Queries, ranked: Ranked, ks: list[int], names: list[Figure], behind: int
) -> dict[str, float]:
    figures = metrics.RankingMetrics(ks, names)
    start = 0
    blocks = []
    size = 0
    for stop, ranks in ranked:
        blocks.append(ranks)
        size += len(ranks.better)
        if stop == len(queries.users) or size > _TOGETHER:
            figures.update(
                queries.with_missed(metrics.joined_ranks(blocks), start, stop, behind)
            )
            start = stop
            blocks = []
            size = 0
    unranked = queries.lost(behind)
    if unranked is not None:
        figures.update(unranked)
    return figures.compute(Runtime())


def _text(report: dict[str, Any]) -> str:
    """Returns the figures as a table under one line of sizes."""
    head = f"{report['users']:,} users, {report['pairs']:,} items to find among {report['items']:,}"
    if missed := report["pairs_whose_item_has_no_vector"]:
        head += f"\n{missed:,} of these items have no vector, and count as not found"
    if repeats := report["pairs_seen_before"]:
        head += f"\n{repeats:,} of these items were seen by their users before (--seen), and count as not found"
    popularity = report["popularity"]
    headers = ["", "these vectors"]
    if popularity:
        headers.append("popularity")
    rows = []
    for name, value in report["figures"].items():
        row = [name, f"{value:.6f}"]
        if popularity:
            row.append(f"{popularity[name]:.6f}")
        rows.append(row)
    return f"{head}\n\n{tabulate(rows, headers=headers, disable_numparse=True)}"


def _write(
    folder: Path,
    report: dict[str, Any],
    curve: Sequence[tuple[int, float, float | None]],
) -> None:
    """Writes ``evaluation.json``, and ``evaluation.png`` with the recall by the number of items shown.

    Raises:
        ValueError: the folder cannot be written.
    """
    write_out(folder, {"evaluation.json": json.dumps(report, indent=2)})
    figure, (panel,) = figure_with_panels(1, (6, 4))
    numbers, recall, popularity = zip(*curve, strict=True)
    panel.plot(numbers, recall, color=BLUE, marker=".", label="these vectors")
    if popularity[0] is not None:
        panel.plot(numbers, popularity, color=RED, marker=".", label="popularity")
    panel.set(
        xscale="log",
        xlabel="items shown",
        ylabel="recall",
        title="share of a user's items that is shown",
    )
    panel.set_ylim(0, None)
    panel.legend(frameon=False)
    save_figure(figure, folder / "evaluation.png")
    print(f"written to {folder}", file=sys.stderr)


def _vectors(path: Path) -> Vectors:
    """Reads the vectors of a file, in the order of their ids.

    Raises:
        DataError: an id is there twice, or a vector is not finite.
    """
    if path.suffix == ".parquet":
        ids, vectors = _of_parquet(path)
    else:
        blocks = list(read_vectors(path))
        ids = torch.cat([block for block, _ in blocks]).numpy()
        vectors = torch.cat([block for _, block in blocks])
    if not len(ids):
        raise DataError(f"{path}: has no vectors")
    if not bool(torch.isfinite(vectors).all()):
        row = int((~torch.isfinite(vectors)).any(1).nonzero()[0])
        raise DataError(
            f"{path}, row {row}: the vector of id {_shown(ids, row)} is not finite; leave it out, or mend it"
        )
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise DataError(
            f"{path}: id {_shown(ordered, int(twice[0]))} is there twice ({len(twice)} such rows); give each id once"
        )
    # Most files are in order, so that their vectors need no copy.
    if not np.array_equal(order, np.arange(len(order))):
        vectors = vectors[torch.from_numpy(order)]
    return Vectors(path, ordered, vectors)


def _of_parquet(path: Path) -> tuple[_Ids, Tensor]:
    """Reads ids and vectors a block of rows at a time, into memory allocated once."""
    with _reading(path, ["id", "vector"]) as file:
        kind = file.schema_arrow.field("vector").type
        if not (
            pa.types.is_list(kind)
            or pa.types.is_fixed_size_list(kind)
            or pa.types.is_large_list(kind)
        ):
            raise DataError(
                f"{path}: column 'vector' is {kind}; must be lists of numbers"
            )
        ids = _ids(path, file.read(columns=["id"]), "id")
        vectors = np.zeros((0, 0), np.float32)
        start = 0
        for rows in file.iter_batches(BLOCK, columns=["vector"]):
            lists = rows["vector"]
            values = lists.flatten().cast(pa.float32()).to_numpy(zero_copy_only=False)
            width, rest = divmod(len(values), len(rows))
            if not start:
                # The file's footer may claim any number of rows, so allocate for the
                # ids that were read.
                vectors = np.empty((len(ids), width), np.float32)
            if rest or lists.null_count or width != vectors.shape[1]:
                raise DataError(
                    f"{path}: column 'vector' has lists of several lengths, or nulls; give vectors of one width"
                )
            if start + len(rows) <= len(ids):
                vectors[start : start + len(rows)] = values.reshape(len(rows), width)
            start += len(rows)
        if start != len(ids):
            raise DataError(
                f"{path}: column 'id' has {len(ids):,} rows, and 'vector' {start:,}: the file is damaged; write it "
                "again"
            )
        return ids, torch.from_numpy(vectors)


@contextlib.contextmanager
def _reading(path: Path, names: Sequence[str]) -> Iterator[pq.ParquetFile]:
    """Opens a parquet file; refuses one without the columns ``names``.

    Raises:
        DataError: it is none, or lacks one.
    """
    try:
        with pq.ParquetFile(path) as file:
            missing = [name for name in names if name not in file.schema_arrow.names]
            if missing:
                raise DataError(
                    f"{path}: column '{missing[0]}' is missing, the file has {file.schema_arrow.names}"
                )
            yield file
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: cannot be read as parquet ({error}); give a parquet file"
        ) from None


def _ids(path: Path, table: pa.Table, name: str) -> _Ids:
    column = raw_ids(path, name, table[name])
    check_no_null(path, name, column, "each row needs an id")
    # Texts become objects: numpy's own texts would all be as wide as the longest.
    ids: _Ids = column.to_numpy(zero_copy_only=False)
    return ids


def _kind(ids: _Ids) -> str:
    return "texts" if ids.dtype == object else "numbers"


def _shown(ids: _Ids, row: int) -> str:
    # tolist() makes a Python number, whose repr is not np.int64(3).
    text = repr(ids[row : row + 1].tolist()[0])
    return text if len(text) <= 80 else f"{text[:77]}..."


def _pairs(path: Path, users: Vectors, items: Vectors) -> tuple[_Ids, _Ids, _Ids]:
    """Returns the rows of users and of items of the pairs of a file, each pair once, and the users' ids."""
    names = list(spelled(path, _SPELLINGS).values())
    with _reading(path, names) as file:
        table = file.read(columns=names)
        ids = [_ids(path, table, name) for name in names]
    for name, column, vectors in zip(names, ids, (users, items), strict=True):
        if column.dtype.kind != vectors.ids.dtype.kind:
            raise DataError(
                f"{path}: column '{name}' has {_kind(column)}, and {vectors.path} has {_kind(vectors.ids)}; write both "
                "as numbers, or both as texts"
            )
    return users.rows(ids[0]), items.rows(ids[1]), ids[0]


def _queries_of(options: argparse.Namespace, users: Vectors, items: Vectors) -> Queries:
    rows, targets, ids = _pairs(options.truth, users, items)
    if (rows < 0).any():
        unknown = ids[rows < 0]
        raise DataError(
            f"{options.truth}: user {_shown(unknown, 0)} has no vector in {options.users} ({len(np.unique(unknown))} "
            "such users); give every user's vector, or leave these pairs out"
        )
    if not len(rows):
        raise DataError(f"{options.truth}: has no pairs")
    has_vector = targets >= 0
    # One number for a pair sorts in a fraction of the time of two.
    pairs = np.sort(rows[has_vector] * len(items.ids) + targets[has_vector])
    owners, targets = np.divmod(pairs[_first_of_each(pairs)], len(items.ids))
    first = _first_of_each(owners)
    query_users = owners[first]
    queries = first.cumsum() - 1
    if not len(query_users):
        raise DataError(
            f"{options.truth}: none of its items has a vector in {options.items}; give files of one model"
        )
    seen_pairs = np.zeros((2, 0), np.int64)
    popularity = None
    if options.seen:
        owners, seen_items, _ = _pairs(options.seen, users, items)
        # The last entry belongs to users without a vector, -1.
        query = np.full(len(users.ids) + 1, -1)
        query[query_users] = np.arange(len(query_users))
        usable = (query[owners] >= 0) & (seen_items >= 0)
        seen_pairs = np.stack([query[owners[usable]], seen_items[usable]])
        # Of all users: those who are asked may be new, and have seen nothing.
        counts = np.bincount(seen_items[seen_items >= 0], minlength=len(items.ids))
        popularity = torch.from_numpy(counts)
    question = metrics.Question(
        targets=torch.from_numpy(targets),
        target_rows=torch.from_numpy(queries),
        seen_rows=torch.from_numpy(seen_pairs[0]),
        seen_items=torch.from_numpy(seen_pairs[1]),
        not_items=(),
    )
    missed = np.sort(rows[~has_vector])
    return Queries(query_users, question, missed, popularity)


def _first_of_each(values: _Ids) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Returns whether each of ascending values is the first of its kind; in a tenth of the time of np.unique."""
    first = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=first[1:])
    return first
