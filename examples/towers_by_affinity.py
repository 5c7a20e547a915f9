"""Groups the columns of a log into towers: ids that occur together share a tower, within a bound on its tables.

    .venv/bin/python examples/towers_by_affinity.py clicks.parquet --towers 3 --picture towers.png

It prints the towers, and the setting for the recipe ``n_tower`` or ``stream``. It follows the tower partitioner of
Disaggregated Multi-Tower (Luo et al., MLSys 2024): affinities of columns become distances, distances become points in a
plane with the least stress, and k-means of the points makes the towers, here under a bound on their load. Affinities
come from the ids alone, or from the tables of a trained model.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

ROWS = 4096  # of the log, by which affinities are computed
STARTS = 16
_ROUNDS = 100


@dataclass(frozen=True, kw_only=True)
class Affinity:
    """The affinity of every pair of columns.

    Args:
        columns: F names.
        values: (F, F) float64, symmetric, 0 (nothing in common) to 1 (on the diagonal).
    """

    columns: tuple[str, ...]
    values: Tensor

    def __post_init__(self) -> None:
        size = len(self.columns)
        if self.values.shape != (size, size):
            raise ValueError(
                f"values: shape {tuple(self.values.shape)}, must be ({size}, {size}) for {size} columns"
            )
        if (
            not torch.isfinite(self.values).all()
            or self.values.min() < 0
            or self.values.max() > 1 + 1e-9
        ):
            raise ValueError(
                f"values: from {float(self.values.min()):.3g} to {float(self.values.max()):.3g}, must be 0 to 1 and "
                "finite"
            )
        if not torch.allclose(self.values, self.values.T):
            raise ValueError(
                "values: the affinity of i with j differs from that of j with i; give a symmetric matrix"
            )


def affinity(vectors: Mapping[str, Tensor]) -> Affinity:
    """Computes the affinity of columns from their vectors in the same B rows.

    It is linear CKA (Kornblith et al. 2019) without its bias (Song et al. 2012): how alike two columns order the rows,
    for any D and whatever the basis of each table.

    Args:
        vectors: (B, D) vectors of each column, by column, such as from :func:`id_vectors` or :func:`learned_vectors`.

    Raises:
        ValueError: fewer than 2 columns or 4 rows.
    """
    rows = {len(each) for each in vectors.values()}
    if len(vectors) < 2 or len(rows) != 1 or min(rows) < 4:
        raise ValueError(
            f"vectors: {len(vectors)} columns of {sorted(rows)} rows; needs 2 or more, of the same 4 rows or more"
        )
    values = _cka([each.detach().double() for each in vectors.values()])
    return Affinity(columns=tuple(vectors), values=values.clamp(0, 1).fill_diagonal_(1))


def _cka(vectors: Sequence[Tensor]) -> Tensor:
    """Computes CKA from products of columns with columns; matrices of rows with rows would be B x B."""
    count = len(vectors[0])
    widths = [each.shape[1] for each in vectors]
    centred = torch.cat([each - each.mean(dim=0) for each in vectors], dim=1)  # (B, C)
    owner = torch.repeat_interleave(torch.arange(len(widths)), torch.tensor(widths))
    by_feature = torch.nn.functional.one_hot(owner, len(widths)).double()  # (C, F)
    norms = centred.square() @ by_feature  # (B, F): the diagonals
    sums = (
        centred * centred.sum(dim=0)
    ) @ by_feature - norms  # (B, F): the rows without them
    products = (
        by_feature.T @ (centred.T @ centred).square() @ by_feature - norms.T @ norms
    )
    totals = sums.sum(dim=0)
    # The unbiased estimate of Song et al. 2012 for all pairs of columns, up to a factor
    # that the scale below cancels.
    of_totals = torch.outer(totals, totals) / ((count - 1) * (count - 2))
    common = products + of_totals - 2 / (count - 2) * sums.T @ sums
    scale = common.diagonal().clamp(min=1e-12).sqrt()
    return common / torch.outer(scale, scale)


def id_vectors(ids: Mapping[str, Tensor], width: int = 128) -> dict[str, Tensor]:
    """Returns a fixed random vector for each id, (B, width), by column: CKA then says how often ids come together.

    Args:
        ids: (B,) int64 ids of each column, by column.
        width: numbers of a random vector.
    """
    vectors = {}
    for seed, (column, values) in enumerate(ids.items()):
        distinct, inverse = torch.unique(values, return_inverse=True)
        generator = torch.Generator().manual_seed(seed)
        vectors[column] = torch.randn(
            len(distinct), width, generator=generator, dtype=torch.float64
        )[inverse]
    return vectors


def learned_vectors(ids: Mapping[str, Tensor], trained: Path) -> dict[str, Tensor]:
    """Returns the rows (B, D) of a trained model's tables, by column; ``torchx_apps.publish`` writes its file."""
    vectors = {}
    with safe_open(trained, framework="pt") as file:
        tables = {
            path.split(".")[-2]: path
            for path in file.keys()  # noqa: SIM118
            if "embedding" in path
        }
        for column, values in ids.items():
            if column not in tables:
                raise ValueError(
                    f"{trained}: it has no table '{column}'; its tables are {', '.join(sorted(tables))}"
                )
            table = file.get_tensor(tables[column])
            if len(table) <= int(values.max()):
                raise ValueError(
                    f"{trained}: table '{column}' has {len(table):,} rows, ids go up to {values.max():,}"
                )
            vectors[column] = table[values]
    return vectors


def pack_evenly(weights: Tensor, towers: int) -> Tensor:
    """Returns the tower of each column, (U,) int64: the heaviest first, each into the lightest tower (Graham 1969).

    Every tower gets a column.

    Args:
        weights: (U,) float64 load of each column.
        towers: T, at most U.
    """
    tower_of = torch.zeros(len(weights), dtype=torch.int64)
    full = [(0.0, 0, number) for number in range(towers)]
    for column in weights.argsort(descending=True, stable=True).tolist():
        load, count, number = min(full)
        tower_of[column] = number
        full[full.index((load, count, number))] = (
            load + float(weights[column]),
            count + 1,
            number,
        )
    return tower_of


def plane(distances: Tensor, rounds: int = 300) -> tuple[Tensor, float]:
    """Fits (F, 2) points to the ``distances`` (F, F); returns the points and their stress.

    SMACOF (de Leeuw 1977), which lowers Kruskal's stress 1 in every round, starts from the classical scaling.

    Args:
        distances: (F, F) float64, symmetric, 0 on the diagonal.
        rounds: rounds of SMACOF.
    """
    count = len(distances)
    centring = torch.eye(count, dtype=distances.dtype) - 1 / count
    values, vectors = torch.linalg.eigh(-0.5 * centring @ distances.square() @ centring)
    points = (vectors[:, -2:] * values[-2:].clamp(min=0).sqrt()).flip(1)
    if points.shape[1] < 2:
        points = torch.nn.functional.pad(points, (0, 2 - points.shape[1]))
    for _ in range(rounds):
        ratio = distances / torch.cdist(points, points).clamp(min=1e-9)
        ratio.fill_diagonal_(0)
        points = (torch.diag(ratio.sum(dim=1)) - ratio) @ points / count
    reached = torch.cdist(points, points)
    total = float(reached.square().sum())
    # Of points that all coincide the stress is 0 by convention.
    if not total:
        return points, 0.0
    stress = float((reached - distances).square().sum() / total) ** 0.5
    return points, stress


def bounded_k_means(
    points: Tensor,
    weights: Tensor,
    bound: float,
    packing: Tensor,
    towers: int,
    seed: int,
) -> Tensor:
    """Returns the tower of each column, (U,) int64: of several starts the least sum of squares that keeps the bound.

    Args:
        points: (U, 2) float64 point of each column.
        weights: (U,) float64 load of each column.
        bound: greatest load of a tower.
        packing: (U,) int64 towers that keep the bound: the first start, and the result where no other is better.
        towers: T.
        seed: seed of the other starts.
    """
    generator = torch.Generator().manual_seed(seed)
    clusters = _Clusters(
        points=points, weights=weights, bound=bound + 1e-9 * abs(bound), towers=towers
    )
    best = packing
    least = float("inf")
    for start in range(STARTS):
        tower_of = (
            clusters.greedy(_spread(points, towers, generator)) if start else packing
        )
        if tower_of is None:
            tower_of = packing
        tower_of, cost = clusters.improved(tower_of)
        if cost < least - 1e-12:
            best = tower_of
            least = cost
    return best


def _spread(points: Tensor, towers: int, generator: torch.Generator) -> Tensor:
    """Draws centres by k-means++ (Arthur and Vassilvitskii 2007)."""
    centres = [int(torch.randint(len(points), (1,), generator=generator))]
    while len(centres) < towers:
        nearest = torch.cdist(points, points[centres]).amin(dim=1).square() + 1e-12
        nearest[centres] = 0
        centres.append(int(torch.multinomial(nearest, 1, generator=generator)))
    return points[centres]


@dataclass(frozen=True, kw_only=True)
class _Clusters:
    """Columns in the plane, to be grouped into towers; ``tower_of`` (U,) int64 is a grouping."""

    points: Tensor
    weights: Tensor
    bound: float
    towers: int

    def greedy(self, centres: Tensor) -> Tensor | None:
        """Returns each column's nearest centre with room, the greatest losses first; None if a column fits nowhere."""
        far = torch.cdist(self.points, centres)
        two = far.topk(min(2, self.towers), dim=1, largest=False).values
        tower_of = torch.zeros(len(far), dtype=torch.int64)
        room = [self.bound] * self.towers
        empty = set(range(self.towers))
        order = (two[:, -1] - two[:, 0]).argsort(descending=True, stable=True).tolist()
        for turn, column in enumerate(order):
            open_towers = (
                empty if len(order) - turn == len(empty) else range(self.towers)
            )
            fitting = [
                number
                for number in open_towers
                if room[number] >= float(self.weights[column])
            ]
            if not fitting:
                return None
            number = min(fitting, key=lambda number: float(far[column, number]))
            tower_of[column] = number
            room[number] -= float(self.weights[column])
            empty.discard(number)
        return tower_of

    def improved(self, tower_of: Tensor) -> tuple[Tensor, float]:
        """Moves single columns, or swaps two, nearer to their towers' centres within the bound, until nothing gains."""
        tower_of = tower_of.clone()
        cost = self.cost(tower_of)
        for _ in range(_ROUNDS):
            far = torch.cdist(self.points, self.centres(tower_of)).square()  # (U, T)
            while self._best_change(tower_of, far):
                pass
            before = cost
            # Moving the centres never raises the cost.
            cost = self.cost(tower_of)
            if cost >= before - 1e-12:
                break
        return tower_of, cost

    def _best_change(self, tower_of: Tensor, far: Tensor) -> bool:
        """Makes the best allowed change by the distances ``far`` (U, T); returns whether any gains."""
        loads = torch.zeros(self.towers, dtype=torch.float64).index_add_(
            0, tower_of, self.weights
        )
        current = far.gather(1, tower_of[:, None])  # (U, 1)
        moves = current - far
        too_heavy = loads[None] + self.weights[:, None] > self.bound
        alone = torch.bincount(tower_of, minlength=self.towers)[tower_of] < 2
        moves[too_heavy | alone[:, None]] = -1
        # (U, U): each column's distance to the other's tower
        swapped = far[:, tower_of]
        swaps = current + current.T - swapped - swapped.T
        after = loads[tower_of][:, None] + self.weights[None] - self.weights[:, None]
        overfull = after > self.bound
        same_tower = tower_of[:, None] == tower_of[None]
        swaps[overfull | overfull.T | same_tower] = -1
        if max(float(moves.max()), float(swaps.max())) <= 1e-12:
            return False
        if moves.max() >= swaps.max():
            column, number = divmod(int(moves.argmax()), self.towers)
            tower_of[column] = number
        else:
            column, other = divmod(int(swaps.argmax()), len(tower_of))
            tower_of[[column, other]] = tower_of[[other, column]]
        return True

    def centres(self, tower_of: Tensor) -> Tensor:
        """Returns (T, 2), the mean point of each tower's columns."""
        one_hot = torch.nn.functional.one_hot(tower_of, self.towers).double()
        return (one_hot.T @ self.points) / one_hot.sum(dim=0).clamp(min=1e-12)[:, None]

    def cost(self, tower_of: Tensor) -> float:
        """Returns the sum over columns of the squared distance to the centre of their tower."""
        return float((self.points - self.centres(tower_of)[tower_of]).square().sum())


class PartitionError(ValueError):
    """No grouping keeps the bound: the message gives the loads, the bound and what would do."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Columns grouped into towers.

    Args:
        groups: columns of each tower, by tower; the tower of the first column comes first.
        load: load of each column, by column.
        bound: greatest load that a tower may have.
        points: (F, 2) points in the plane, in the order of ``affinity.columns``.
        stress: difference of distances in the plane from those of the affinities, 0 to 1 (Kruskal's stress 1).
        affinity: affinities that the columns were grouped by.
    """

    groups: Mapping[str, tuple[str, ...]]
    load: Mapping[str, float]
    bound: float
    points: Tensor
    stress: float
    affinity: Affinity

    def loads(self) -> dict[str, float]:
        """Returns the load of each tower, by tower."""
        return {
            tower: sum(self.load[column] for column in columns)
            for tower, columns in self.groups.items()
        }

    def contrast(self) -> tuple[float, float]:
        """Returns the mean affinity of two columns of one tower, and of two towers; NaN without such pairs."""
        number_of: dict[str, int] = {}
        for number, columns in enumerate(self.groups.values()):
            number_of |= dict.fromkeys(columns, number)
        tower_of = torch.tensor([number_of[column] for column in self.affinity.columns])
        same = tower_of[:, None] == tower_of[None]
        # A column's affinity to itself is 1 and says nothing.
        pairs = ~torch.eye(len(tower_of), dtype=torch.bool)
        within = self.affinity.values[same & pairs].mean()
        between = self.affinity.values[~same].mean()
        return float(within), float(between)

    def __str__(self) -> str:
        within, between = self.contrast()
        loads = self.loads()
        lines = [
            f"{tower}: load {loads[tower]:,.6g}: {', '.join(columns)}"
            for tower, columns in self.groups.items()
        ]
        lines.append(
            f"load bound {self.bound:,.6g}; affinity within towers {within:.3f}, between them {between:.3f}"
        )
        return "\n".join([*lines, f"stress of the plane {self.stress:.3f}"])

    def draw(self, path: Path) -> None:
        """Writes a picture of the plane to ``path``: a point for each column, a colour for each tower."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 5.5), layout="constrained")
        axes = figure.subplots()
        points = {
            column: (float(x), float(y))
            for column, (x, y) in zip(self.affinity.columns, self.points, strict=True)
        }
        loads = self.loads()
        for tower, columns in self.groups.items():
            x, y = zip(*(points[column] for column in columns), strict=True)
            axes.scatter(x, y, s=60, label=f"{tower}, load {loads[tower]:,.4g}")
            for column in columns:
                axes.annotate(
                    column,
                    points[column],
                    xytext=(5, 4),
                    textcoords="offset points",
                    fontsize=8,
                )
        axes.set(
            title=f"columns by affinity (stress {self.stress:.2f})",
            xticks=[],
            yticks=[],
            aspect="equal",
        )
        axes.legend(
            frameon=False,
            fontsize=8,
            title=f"bound {self.bound:,.4g}",
            loc="center left",
            bbox_to_anchor=(1, 0.5),
        )
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=120)


def partition(
    affinity: Affinity,
    *,
    towers: int,
    load: Mapping[str, float] | None = None,
    bound: float | None = None,
    seed: int = 0,
) -> Partition:
    """Groups columns into towers by their affinity.

    Args:
        affinity: affinity of every pair of columns.
        towers: T, the number of towers; each gets one column at least.
        load: load of each column, by column: bytes of its table, or ids looked up per row; by default 1.
        bound: greatest load of a tower; where not given, 1.1 times an even share, or what the even packing needs if
            that is more.
        seed: seed of the starts of k-means.

    Raises:
        PartitionError: no grouping keeps the bound.
        ValueError: a wrong number of towers, or an unknown column.

    Example:
        >>> near = torch.block_diag(torch.full((2, 2), 0.9), torch.full((2, 2), 0.9)).double().fill_diagonal_(1)
        >>> dict(partition(Affinity(columns=("a", "b", "c", "d"), values=near), towers=2).groups)
        {'tower_0': ('a', 'b'), 'tower_1': ('c', 'd')}
    """
    names = affinity.columns
    loads = _loads(names, load)
    if not 1 <= towers <= len(names):
        raise ValueError(
            f"towers={towers}: must be 1 to {len(names)}, the number of columns"
        )
    weights = torch.tensor([loads[name] for name in names], dtype=torch.float64)
    packing = pack_evenly(weights, towers)
    tower_loads = torch.zeros(towers, dtype=torch.float64).index_add_(
        0, packing, weights
    )
    fullest = float(tower_loads.max())
    # By default a tenth above the mean load, or the fullest tower of an even packing if
    # that is more.
    limit = (
        bound
        if bound is not None
        else max(1.1 * float(weights.sum()) / towers, fullest)
    )
    _check_bound(limit, weights, fullest, towers, names)
    points, stress = plane((1 - affinity.values).fill_diagonal_(0))
    tower_of = bounded_k_means(points, weights, limit, packing, towers, seed)
    by_tower: dict[int, list[int]] = {}
    for index, number in enumerate(tower_of.tolist()):
        by_tower.setdefault(number, []).append(index)
    ordered = sorted(by_tower.values())  # by their first column
    groups = {
        f"tower_{i}": tuple(names[index] for index in members)
        for i, members in enumerate(ordered)
    }
    return Partition(
        groups=groups,
        load=loads,
        bound=limit,
        points=points,
        stress=stress,
        affinity=affinity,
    )


def _loads(names: Sequence[str], load: Mapping[str, float] | None) -> dict[str, float]:
    if load is None:
        return dict.fromkeys(names, 1.0)
    missing = [name for name in names if name not in load]
    if missing:
        raise ValueError(
            f"load: no load for {missing}; give one for each of {list(names)}"
        )
    wrong = {name: load[name] for name in names if not 0 <= load[name] < float("inf")}
    if wrong:
        raise ValueError(f"load: {wrong}: must be finite and 0 or more")
    return {name: float(load[name]) for name in names}


def _check_bound(
    bound: float, weights: Tensor, fullest: float, towers: int, names: Sequence[str]
) -> None:
    if not bound >= 0:
        raise ValueError(f"bound={bound}: must be 0 or more")
    heaviest = int(weights.argmax())
    total = float(weights.sum())
    limit = f"bound={bound:,.6g}"
    if float(weights[heaviest]) > bound:
        raise PartitionError(
            f"{limit}: '{names[heaviest]}' alone has a load of {float(weights[heaviest]):,.6g}; raise the bound to "
            "that at least"
        )
    if total > bound * towers:
        raise PartitionError(
            f"{limit}: the columns' loads add up to {total:,.6g}, more than {towers} x {bound:,.6g} = "
            f"{bound * towers:,.6g}; raise the bound to {fullest:,.6g}, or take {-int(-total // bound)} towers or more"
        )
    if fullest > bound:
        raise PartitionError(
            f"{limit}: no packing of {len(weights)} loads into {towers} towers was found that keeps it; the most even "
            f"one has {fullest:,.6g} in a tower: raise the bound to that, or take more towers"
        )


def read_ids(log: Path, columns: Sequence[str]) -> dict[str, Tensor]:
    """Reads the first :data:`ROWS` rows of a log's columns of ids, (B,) int64 each; by default of all that have ids."""
    rows = pq.ParquetFile(log).iter_batches(ROWS)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{log}: it has no rows")
    ids = {}
    for name in columns or first.schema.names:
        if name not in first.schema.names:
            raise ValueError(
                f"{log}: there is no column '{name}'; its columns are {', '.join(first.schema.names)}"
            )
        column = first.column(name)
        fault = ""
        if not pa.types.is_integer(column.type):
            fault = f"is {column.type}, not whole numbers"
        elif column.null_count:
            fault = f"has {column.null_count} gaps"
        elif pc.min(column).as_py() < 0:
            fault = "has negative numbers"
        if not fault:
            ids[name] = torch.from_numpy(column.to_numpy().astype(np.int64))
        elif columns:
            raise ValueError(
                f"{log}: column '{name}' {fault}; name columns of ids, as rec.data.preprocess writes them"
            )
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "log", type=Path, help="parquet file with a column of ids for each feature"
    )
    parser.add_argument("--towers", type=int, required=True, help="number of towers")
    parser.add_argument(
        "--columns",
        nargs="*",
        default=[],
        help="columns of ids; all of whole numbers by default",
    )
    parser.add_argument(
        "--dim", type=int, default=16, help="width of a row of the tables"
    )
    parser.add_argument(
        "--bound",
        type=float,
        help="MiB of one tower's tables; 1.1 times an even share by default",
    )
    parser.add_argument(
        "--trained",
        type=Path,
        help="safetensors of a trained model, whose tables are then compared",
    )
    parser.add_argument(
        "--picture", type=Path, help="file for a picture of the columns in the plane"
    )
    options = parser.parse_args()
    try:
        ids = read_ids(options.log, options.columns)
        vectors = (
            learned_vectors(ids, options.trained)
            if options.trained
            else id_vectors(ids)
        )
        # A table has a row for each id up to the greatest.
        mebibytes = {
            name: 4 * options.dim * (int(values.max()) + 1) / 2**20
            for name, values in ids.items()
        }
        result = partition(
            affinity(vectors),
            towers=options.towers,
            load=mebibytes,
            bound=options.bound,
        )
        if options.picture:
            result.draw(options.picture)
    except (OSError, ValueError, SafetensorError) as error:
        parser.exit(2, f"{error}\n")
    print(
        f"{result}\n--model.towers {','.join('+'.join(names) for names in result.groups.values())}"
    )


if __name__ == "__main__":
    main()
