"""partition() groups features into towers by affinity, under a bound on what a tower looks up or holds.

It follows the tower partitioner of Disaggregated Multi-Tower (Luo et al., MLSys 2024): affinities, from a trained
model's vectors or from the data alone, become distances; distances become points in a plane with the least stress; and
k-means of the points makes the towers, here under a bound on their load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_ext.batch import TowerBatch
from torchrec_ext.modules.tower import Tower

AffinityMeasure = Literal["cosine", "cka"]


@dataclass(frozen=True, kw_only=True)
class Affinity:
    """The affinity of every pair of features.

    Args:
        features: F names.
        values: (F, F) float64, symmetric, 0 (nothing in common) to 1 (on the diagonal).
    """

    features: tuple[str, ...]
    values: Tensor

    def __post_init__(self) -> None:
        size = len(self.features)
        if self.values.shape != (size, size):
            raise ValueError(f"values: shape {tuple(self.values.shape)}, must be ({size}, {size}) for {size} features")
        if not torch.isfinite(self.values).all() or self.values.min() < 0 or self.values.max() > 1 + 1e-9:
            raise ValueError(
                f"values: from {float(self.values.min()):.3g} to {float(self.values.max()):.3g}, must be 0 to 1 and "
                "finite"
            )
        if not torch.allclose(self.values, self.values.T):
            raise ValueError("values: the affinity of i with j differs from that of j with i; give a symmetric matrix")


def affinity(vectors: Mapping[str, Tensor], measure: AffinityMeasure = "cosine") -> Affinity:
    """Computes the affinity of features from their vectors in the same B rows.

    Args:
        vectors: (B, D) vectors of each feature, by feature, such as from :func:`pooled_vectors` or :func:`id_vectors`.
        measure: ``cosine``, the mean over the rows of |cos| of two features' vectors, as DMT probes a model whose
            features meet in dot products; all D must be equal. ``cka``, how alike two features order the rows (linear
            CKA, Kornblith et al. 2019, without its bias, Song et al. 2012), for any D and whatever the basis of each
            table.

    Raises:
        ValueError: fewer than 2 features or 4 rows, or widths that differ under ``cosine``.
    """
    if measure not in get_args(AffinityMeasure):
        raise ValueError(f"measure={measure!r}: must be one of {', '.join(get_args(AffinityMeasure))}")
    rows = {len(each) for each in vectors.values()}
    if len(vectors) < 2 or len(rows) != 1 or min(rows) < 4:
        raise ValueError(
            f"vectors: {len(vectors)} features of {sorted(rows)} rows; needs 2 features or more, of the same 4 rows "
            "or more"
        )
    exact = [each.detach().double() for each in vectors.values()]
    values = _cosine(list(vectors), exact) if measure == "cosine" else _cka(exact)
    return Affinity(features=tuple(vectors), values=values.clamp(0, 1).fill_diagonal_(1))


def _cosine(names: Sequence[str], vectors: Sequence[Tensor]) -> Tensor:
    widths = {name: each.shape[1] for name, each in zip(names, vectors, strict=True)}
    if len(set(widths.values())) > 1:
        raise ValueError(f"vectors: widths {widths} differ, and a cosine needs equal ones; use measure='cka'")
    unit = torch.nn.functional.normalize(torch.stack(list(vectors)), dim=2)  # (F, B, D)
    total = unit.new_zeros(len(unit), len(unit))
    for rows in torch.split(unit, 256, dim=1):  # (F, F, rows) at a time
        total += torch.einsum("ird,jrd->ijr", rows, rows).abs().sum(dim=2)
    return total / unit.shape[1]


def _cka(vectors: Sequence[Tensor]) -> Tensor:
    """Computes CKA from products of columns with columns; matrices of rows with rows would be B x B."""
    count = len(vectors[0])
    widths = [each.shape[1] for each in vectors]
    centred = torch.cat([each - each.mean(dim=0) for each in vectors], dim=1)  # (B, C)
    owner = torch.repeat_interleave(torch.arange(len(widths)), torch.tensor(widths))
    by_feature = torch.nn.functional.one_hot(owner, len(widths)).double()  # (C, F)
    norms = centred.square() @ by_feature  # (B, F): the diagonals
    sums = (centred * centred.sum(dim=0)) @ by_feature - norms  # (B, F): the rows without them
    products = by_feature.T @ (centred.T @ centred).square() @ by_feature - norms.T @ norms
    totals = sums.sum(dim=0)
    # The unbiased estimate of Song et al. 2012 for all pairs of features, up to a factor that the scale below cancels.
    of_totals = torch.outer(totals, totals) / ((count - 1) * (count - 2))
    common = products + of_totals - 2 / (count - 2) * sums.T @ sums
    scale = common.diagonal().clamp(min=1e-12).sqrt()
    return common / torch.outer(scale, scale)


def pooled_vectors(model: nn.Module, batches: Iterable[TowerBatch]) -> dict[str, Tensor]:
    """Returns each feature's pooled embeddings in the B rows of all ``batches``, (B, D), by feature.

    Features of a shared tower have fewer rows and are repeated as the model repeats them. Where the model is sharded,
    every rank must call it, and gets its own rows.

    Args:
        model: module that holds EmbeddingBagCollections, sharded or not.
        batches: batches that it is called with.

    Raises:
        ValueError: no batch, or no collection that pools.
    """
    pooled: dict[str, list[Tensor]] = {}
    with torch.no_grad(), _recorded(model) as outputs:
        for batch in batches:
            outputs.clear()
            model(batch)
            for feature, value in outputs.items():
                if batch.shared is not None and len(value) != len(batch):
                    value = value[batch.shared.index]
                pooled.setdefault(feature, []).append(value.cpu())
    if not pooled:
        raise ValueError("model: nothing pooled was looked up; give batches, and a model with EmbeddingBagCollections")
    return {feature: torch.cat(blocks) for feature, blocks in pooled.items()}


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yields a mapping, filled with the outputs of pooling collections while the block runs, by feature."""
    outputs: dict[str, Tensor] = {}

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        outputs.update(output.to_dict())

    kinds = (EmbeddingBagCollection, ShardedEmbeddingBagCollection)
    pooling = [module for module in model.modules() if isinstance(module, kinds)]
    handles = [module.register_forward_hook(keep) for module in pooling]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def id_vectors(batch: TowerBatch, features: Sequence[str], width: int = 128) -> dict[str, Tensor]:
    """Returns the mean of a fixed random vector for each id of each bag, (B, width), by feature.

    It needs no training: by the measure ``cka`` the affinity of two features is how often their ids come together,
    whatever the ids are.

    Args:
        batch: B rows.
        features: names of features of the batch.
        width: numbers of a random vector.
    """
    vectors = {}
    for seed, feature in enumerate(features):
        bags = batch.bags(feature)
        ids, inverse = torch.unique(bags.values(), return_inverse=True)
        random_vectors = torch.randn(
            len(ids), width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        lengths = bags.lengths()
        rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths.cpu())
        sums = torch.zeros(len(lengths), width, dtype=torch.float64).index_add_(0, rows, random_vectors[inverse.cpu()])
        mean = sums / lengths.cpu().clamp(min=1)[:, None]
        if batch.shared is not None and len(mean) != len(batch):
            mean = mean[batch.shared.index.cpu()]
        vectors[feature] = mean
    return vectors


def feature_bytes(towers: Iterable[Tower]) -> dict[str, float]:
    """Returns the bytes of each feature's table as float32, by feature; features of one table get equal shares."""
    loads = {}
    for tower in towers:
        for table in tower.tables:
            for feature in table.feature_names:
                loads[feature] = 4.0 * table.num_embeddings * table.embedding_dim / len(table.feature_names)
    return loads


STARTS = 16
_ROUNDS = 100


def pack_evenly(weights: Tensor, towers: int) -> Tensor:
    """Returns the tower of each unit, (U,) int64: the heaviest first, each into the lightest tower (Graham 1969).

    Every tower gets a unit.

    Args:
        weights: (U,) float64 load of each unit.
        towers: T, at most U.
    """
    tower_of = torch.zeros(len(weights), dtype=torch.int64)
    full = [(0.0, 0, number) for number in range(towers)]
    for unit in weights.argsort(descending=True, stable=True).tolist():
        load, count, number = min(full)
        tower_of[unit] = number
        full[full.index((load, count, number))] = (load + float(weights[unit]), count + 1, number)
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
    points: Tensor, sizes: Tensor, weights: Tensor, bound: float, packing: Tensor, towers: int, seed: int
) -> Tensor:
    """Returns the tower of each unit, (U,) int64: of several starts the least sum of squares that keeps the bound.

    Args:
        points: (U, 2) float64 point of each unit.
        sizes: (U,) float64 number of features in each unit.
        weights: (U,) float64 load of each unit.
        bound: greatest load of a tower.
        packing: (U,) int64 towers that keep the bound: the first start, and the result where no other is better.
        towers: T.
        seed: seed of the other starts.
    """
    generator = torch.Generator().manual_seed(seed)
    # Loads that are added up in another order may exceed the bound by rounding.
    clusters = _Clusters(points=points, sizes=sizes, weights=weights, bound=bound + 1e-9 * abs(bound), towers=towers)
    best = packing
    least = float("inf")
    for start in range(STARTS):
        tower_of = None
        # The first start is the packing.
        if start:
            tower_of = clusters.greedy(_spread(points, towers, generator))
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
    """Units in the plane, to be grouped into towers; ``tower_of`` (U,) int64 is a grouping."""

    points: Tensor
    sizes: Tensor
    weights: Tensor
    bound: float
    towers: int

    def greedy(self, centres: Tensor) -> Tensor | None:
        """Returns each unit's nearest centre with room, the greatest losses first; None if a unit fits nowhere."""
        far = torch.cdist(self.points, centres)
        two = far.topk(min(2, self.towers), dim=1, largest=False).values
        tower_of = torch.zeros(len(far), dtype=torch.int64)
        room = [self.bound] * self.towers
        empty = set(range(self.towers))
        order = (two[:, -1] - two[:, 0]).argsort(descending=True, stable=True).tolist()
        for turn, unit in enumerate(order):
            # Each tower must get a unit, so the last units are left to the empty ones.
            open_towers = empty if len(order) - turn == len(empty) else range(self.towers)
            fitting = [number for number in open_towers if room[number] >= float(self.weights[unit])]
            if not fitting:
                return None
            number = min(fitting, key=lambda number: float(far[unit, number]))
            tower_of[unit] = number
            room[number] -= float(self.weights[unit])
            empty.discard(number)
        return tower_of

    def improved(self, tower_of: Tensor) -> tuple[Tensor, float]:
        """Moves single units, or swaps two, nearer to their towers' centres within the bound, until nothing gains."""
        tower_of = tower_of.clone()
        cost = self.cost(tower_of)
        for _ in range(_ROUNDS):
            far = self.sizes[:, None] * torch.cdist(self.points, self.centres(tower_of)).square()  # (U, T)
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
        loads = torch.zeros(self.towers, dtype=torch.float64).index_add_(0, tower_of, self.weights)
        current = far.gather(1, tower_of[:, None])  # (U, 1)
        moves = current - far
        too_heavy = loads[None] + self.weights[:, None] > self.bound
        alone = torch.bincount(tower_of, minlength=self.towers)[tower_of] < 2
        moves[too_heavy | alone[:, None]] = -1
        swapped = far[:, tower_of]  # (U, U): each unit's distance to the other's tower
        swaps = current + current.T - swapped - swapped.T
        after = loads[tower_of][:, None] + self.weights[None] - self.weights[:, None]
        overfull = after > self.bound
        same_tower = tower_of[:, None] == tower_of[None]
        swaps[overfull | overfull.T | same_tower] = -1
        # A smaller gain is rounding, by which two groupings could alternate for ever.
        if max(float(moves.max()), float(swaps.max())) <= 1e-12:
            return False
        if moves.max() >= swaps.max():
            unit, number = divmod(int(moves.argmax()), self.towers)
            tower_of[unit] = number
        else:
            unit, other = divmod(int(swaps.argmax()), len(tower_of))
            tower_of[[unit, other]] = tower_of[[other, unit]]
        return True

    def centres(self, tower_of: Tensor) -> Tensor:
        """Returns (T, 2), the mean point of each tower's features."""
        one_hot = torch.nn.functional.one_hot(tower_of, self.towers).double() * self.sizes[:, None]
        return (one_hot.T @ self.points) / one_hot.sum(dim=0).clamp(min=1e-12)[:, None]

    def cost(self, tower_of: Tensor) -> float:
        """Returns the sum over features of the squared distance to the centre of their tower."""
        return float((self.sizes * (self.points - self.centres(tower_of)[tower_of]).square().sum(dim=1)).sum())


Strategy = Literal["coherent", "diverse"]


class PartitionError(ValueError):
    """No grouping keeps the bound: the message gives the loads, the bound and what would do."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Features grouped into towers.

    Args:
        groups: features of each tower, by tower; the tower of the first feature comes first.
        load: load of each feature, by feature.
        bound: greatest load that a tower may have.
        points: (F, 2) points in the plane, in the order of ``affinity.features``.
        stress: difference of distances in the plane from those of the affinities, 0 to 1 (Kruskal's stress 1).
        affinity: affinities that the features were grouped by.
    """

    groups: Mapping[str, tuple[str, ...]]
    load: Mapping[str, float]
    bound: float
    points: Tensor
    stress: float
    affinity: Affinity

    def loads(self) -> dict[str, float]:
        """Returns the load of each tower, by tower."""
        loads = {}
        for tower, features in self.groups.items():
            loads[tower] = sum(self.load[feature] for feature in features)
        return loads

    def contrast(self) -> tuple[float, float]:
        """Returns the mean affinity of two features of one tower, and of two towers; NaN without such pairs."""
        number_of: dict[str, int] = {}
        for number, features in enumerate(self.groups.values()):
            number_of |= dict.fromkeys(features, number)
        tower_of = torch.tensor([number_of[feature] for feature in self.affinity.features])
        same = tower_of[:, None] == tower_of[None]
        # A feature's affinity to itself is 1 and says nothing.
        pairs = ~torch.eye(len(tower_of), dtype=torch.bool)
        within = self.affinity.values[same & pairs].mean()
        between = self.affinity.values[~same].mean()
        return float(within), float(between)

    def tables(self, tables: Sequence[BaseEmbeddingConfig]) -> dict[str, list[BaseEmbeddingConfig]]:
        """Returns the tables to declare each tower with, by tower.

        Args:
            tables: configs of all tables.

        Raises:
            PartitionError: a table whose features are in several towers, or in none.
        """
        tower_of: dict[str, str] = {}
        for tower, features in self.groups.items():
            tower_of |= dict.fromkeys(features, tower)
        by_tower: dict[str, list[BaseEmbeddingConfig]] = {tower: [] for tower in self.groups}
        for table in tables:
            readers = sorted({tower_of.get(feature, "none") for feature in table.feature_names})
            if len(readers) > 1 or readers == ["none"]:
                raise PartitionError(
                    f"table '{table.name}': its features {', '.join(table.feature_names)} stand in the towers "
                    f"{', '.join(readers)}; a table has one place: give partition() all its features, with "
                    "together=[...] of them"
                )
            by_tower[readers[0]].append(table)
        return by_tower

    def __str__(self) -> str:
        within, between = self.contrast()
        loads = self.loads()
        lines = [f"{tower}: load {loads[tower]:,.6g}: {', '.join(features)}" for tower, features in self.groups.items()]
        lines.append(f"load bound {self.bound:,.6g}; affinity within towers {within:.3f}, between them {between:.3f}")
        return "\n".join([*lines, f"stress of the plane {self.stress:.3f}"])

    def draw(self, path: Path) -> None:
        """Writes a picture of the plane to ``path``: a point for each feature, a colour for each tower."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 5.5), layout="constrained")
        axes = figure.subplots()
        points = {
            feature: (float(x), float(y)) for feature, (x, y) in zip(self.affinity.features, self.points, strict=True)
        }
        loads = self.loads()
        for tower, features in self.groups.items():
            x, y = zip(*(points[feature] for feature in features), strict=True)
            axes.scatter(x, y, s=60, label=f"{tower}, load {loads[tower]:,.4g}")
            for feature in features:
                axes.annotate(feature, points[feature], xytext=(5, 4), textcoords="offset points", fontsize=8)
        axes.set(title=f"features by affinity (stress {self.stress:.2f})", xticks=[], yticks=[], aspect="equal")
        axes.legend(
            frameon=False, fontsize=8, title=f"bound {self.bound:,.4g}", loc="center left", bbox_to_anchor=(1, 0.5)
        )
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=120)


def partition(
    affinity: Affinity,
    *,
    towers: int,
    load: Mapping[str, float] | None = None,
    bound: float | None = None,
    together: Sequence[Sequence[str]] = (),
    strategy: Strategy = "coherent",
    seed: int = 0,
) -> Partition:
    """Groups features into towers by their affinity.

    Args:
        affinity: affinity of every pair of features.
        towers: T, the number of towers; each gets one feature at least.
        load: load of each feature, by feature: bytes of its table, or ids looked up per row; by default 1.
        bound: greatest load of a tower; where not given, 1.1 times an even share, or what the even packing needs if
            that is more.
        together: groups of features that stay in one tower, such as those that read one table.
        strategy: ``coherent`` puts features of great affinity into one tower, ``diverse`` into different ones.
        seed: seed of the starts of k-means.

    Raises:
        PartitionError: no grouping keeps the bound.
        ValueError: a wrong number of towers, or an unknown feature.

    Example:
        >>> near = torch.block_diag(torch.full((2, 2), 0.9), torch.full((2, 2), 0.9)).double().fill_diagonal_(1)
        >>> dict(partition(Affinity(features=("a", "b", "c", "d"), values=near), towers=2).groups)
        {'tower_0': ('a', 'b'), 'tower_1': ('c', 'd')}
    """
    if strategy not in get_args(Strategy):
        raise ValueError(f"strategy={strategy!r}: must be one of {', '.join(get_args(Strategy))}")
    names = affinity.features
    loads = _loads(names, load)
    units = _units(names, together)
    if not 1 <= towers <= len(units):
        raise ValueError(f"towers={towers}: must be 1 to {len(units)}, the features that may stand apart")
    weights = torch.zeros(len(units), dtype=torch.float64)
    for number, unit in enumerate(units):
        weights[number] = sum(loads[names[index]] for index in unit)
    packing = pack_evenly(weights, towers)
    tower_loads = torch.zeros(towers, dtype=torch.float64).index_add_(0, packing, weights)
    fullest = float(tower_loads.max())
    limit = bound
    # By default a tenth above the mean load, or the fullest tower of an even packing if that is more.
    if limit is None:
        limit = max(1.1 * float(weights.sum()) / towers, fullest)
    _check_bound(limit, weights, fullest, towers, [names[unit[0]] for unit in units])
    # For towers of unlike features, those of great affinity are far apart.
    distances = 1 - affinity.values if strategy == "coherent" else affinity.values.clone()
    points, stress = plane(distances.fill_diagonal_(0))
    unit_points = torch.stack([points[unit].mean(dim=0) for unit in units])
    sizes = torch.tensor([len(unit) for unit in units], dtype=torch.float64)
    tower_of = bounded_k_means(unit_points, sizes, weights, limit, packing, towers, seed)
    by_tower: dict[int, list[int]] = {}
    for unit, number in zip(units, tower_of.tolist(), strict=True):
        by_tower.setdefault(number, []).extend(unit)
    groups = {}
    # Towers are ordered by their first feature.
    for number, members in enumerate(sorted(map(sorted, by_tower.values()))):
        groups[f"tower_{number}"] = tuple(names[index] for index in members)
    return Partition(groups=groups, load=loads, bound=limit, points=points, stress=stress, affinity=affinity)


def _loads(names: Sequence[str], load: Mapping[str, float] | None) -> dict[str, float]:
    if load is None:
        return dict.fromkeys(names, 1.0)
    missing = [name for name in names if name not in load]
    if missing:
        raise ValueError(f"load: no load for {missing}; give one for each of {list(names)}")
    wrong = {name: load[name] for name in names if not 0 <= load[name] < float("inf")}
    if wrong:
        raise ValueError(f"load: {wrong}: must be finite and 0 or more")
    return {name: float(load[name]) for name in names}


def _units(names: Sequence[str], together: Sequence[Sequence[str]]) -> list[list[int]]:
    """Groups the indices of features that must share a tower; overlapping groups merge."""
    index_of = {name: index for index, name in enumerate(names)}
    unit = list(range(len(names)))
    for group in together:
        unknown = [name for name in group if name not in index_of]
        if unknown:
            raise ValueError(f"together: {unknown} are not features of the affinity; these are {list(names)}")
        joined = {unit[index_of[name]] for name in group}
        unit = [min(joined) if number in joined else number for number in unit]
    members: dict[int, list[int]] = {}
    for index, number in enumerate(unit):
        members.setdefault(number, []).append(index)
    return list(members.values())


def _check_bound(bound: float, weights: Tensor, fullest: float, towers: int, names: Sequence[str]) -> None:
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
            f"{limit}: the features' loads add up to {total:,.6g}, more than {towers} x {bound:,.6g} = "
            f"{bound * towers:,.6g}; raise the bound to {fullest:,.6g}, or take {-int(-total // bound)} towers or more"
        )
    if fullest > bound:
        raise PartitionError(
            f"{limit}: no packing of {len(weights)} loads into {towers} towers was found that keeps it; the most even "
            f"one has {fullest:,.6g} in a tower: raise the bound to that, or take more towers"
        )
