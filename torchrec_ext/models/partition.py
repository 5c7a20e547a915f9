"""partition(): features into towers by affinity, under a bound on what a tower looks up or holds.

The tower partitioner of Disaggregated Multi-Tower (Luo et al., MLSys 2024): affinities become distances, distances become places in
a plane by the least stress, and k-means of the places makes the towers, here under a bound of the load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_ext.models.affinity import Affinity
from torchrec_ext.models.clustering import bounded_k_means, packed, plane

Strategy = Literal["coherent", "diverse"]


class PartitionError(ValueError):
    """No grouping keeps the bound: the message gives the loads, the bound and what would do."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Towers of features.

    Args:
        groups: by tower its features, the tower of the first feature first.
        load: by feature.
        bound: no tower's load is greater.
        places: (F, 2), by the order of ``affinity.features``.
        stress: how far distances in the plane are from those of the affinities, 0 to 1 (Kruskal's).
        affinity: as given.
    """

    groups: Mapping[str, tuple[str, ...]]
    load: Mapping[str, float]
    bound: float
    places: Tensor
    stress: float
    affinity: Affinity

    def loads(self) -> dict[str, float]:
        """The load of each tower."""
        return {tower: sum(self.load[feature] for feature in features) for tower, features in self.groups.items()}

    def contrast(self) -> tuple[float, float]:
        """The mean affinity of two features of one tower, and of two towers; NaN where there are no such pairs."""
        place = {feature: number for number, features in enumerate(self.groups.values()) for feature in features}
        own = torch.tensor([place[feature] for feature in self.affinity.features])
        same = own[:, None] == own[None]
        pairs = ~torch.eye(len(own), dtype=torch.bool)
        return float(self.affinity.values[same & pairs].mean()), float(self.affinity.values[~same].mean())

    def tables(self, tables: Sequence[BaseEmbeddingConfig]) -> dict[str, list[BaseEmbeddingConfig]]:
        """Each tower's share of ``tables``, to declare it with.

        Raises:
            PartitionError: a table whose features stand in several towers, or in none.
        """
        tower_of = {feature: tower for tower, features in self.groups.items() for feature in features}
        found: dict[str, list[BaseEmbeddingConfig]] = {tower: [] for tower in self.groups}
        for table in tables:
            readers = sorted({tower_of.get(feature, "none") for feature in table.feature_names})
            if len(readers) > 1 or readers == ["none"]:
                raise PartitionError(
                    f"table '{table.name}': its features {', '.join(table.feature_names)} stand in the towers "
                    f"{', '.join(readers)}; a table has one place: give partition() all its features, with together=[...] of them"
                )
            found[readers[0]].append(table)
        return found

    def __str__(self) -> str:
        within, between = self.contrast()
        loads = self.loads()
        lines = [f"{tower}: load {loads[tower]:,.6g}: {', '.join(features)}" for tower, features in self.groups.items()]
        lines.append(f"load bound {self.bound:,.6g}; affinity within towers {within:.3f}, between them {between:.3f}")
        return "\n".join([*lines, f"stress of the plane {self.stress:.3f}"])

    def draw(self, path: Path) -> None:
        """A picture of the plane: a point for each feature, a colour for each tower."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 5.5), layout="constrained")
        axes = figure.subplots()
        place = {feature: (float(x), float(y)) for feature, (x, y) in zip(self.affinity.features, self.places, strict=True)}
        loads = self.loads()
        for tower, features in self.groups.items():
            x, y = zip(*(place[feature] for feature in features), strict=True)
            axes.scatter(x, y, s=60, label=f"{tower}, load {loads[tower]:,.4g}")
            for feature in features:
                axes.annotate(feature, place[feature], xytext=(5, 4), textcoords="offset points", fontsize=8)
        axes.set(title=f"features by affinity (stress {self.stress:.2f})", xticks=[], yticks=[], aspect="equal")
        axes.legend(frameon=False, fontsize=8, title=f"bound {self.bound:,.4g}", loc="center left", bbox_to_anchor=(1, 0.5))
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
    """Groups features into ``towers``.

    Args:
        affinity: of the features.
        towers: how many; each gets one feature at least.
        load: by feature, bytes of its table or ids looked up per row; 1 for each where not given.
        bound: the greatest load of a tower; where not given, 1.1 times an even share, or the least that the packing found needs.
        together: features that stay in one tower, such as those that read one table.
        strategy: ``coherent`` puts features of great affinity into one tower, ``diverse`` into different ones.
        seed: of the starts of k-means.

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
    weights = torch.tensor([sum(loads[names[place]] for place in unit) for unit in units], dtype=torch.float64)
    packing = packed(weights, towers)
    fullest = float(torch.zeros(towers, dtype=torch.float64).index_add_(0, packing, weights).max())
    limit = bound if bound is not None else max(1.1 * float(weights.sum()) / towers, fullest)
    _check_bound(limit, weights, fullest, towers, [names[unit[0]] for unit in units])
    distances = 1 - affinity.values if strategy == "coherent" else affinity.values.clone()
    places, stress = plane(distances.fill_diagonal_(0))
    centres = torch.stack([places[unit].mean(dim=0) for unit in units])
    sizes = torch.tensor([len(unit) for unit in units], dtype=torch.float64)
    own = bounded_k_means(centres, sizes, weights, limit, packing, towers, seed)
    numbers = torch.empty(len(names), dtype=torch.int64)
    for unit, number in zip(units, own.tolist(), strict=True):
        numbers[unit] = number
    order = list(dict.fromkeys(numbers.tolist()))
    groups = {
        f"tower_{place}": tuple(name for name, own_number in zip(names, numbers.tolist(), strict=True) if own_number == number)
        for place, number in enumerate(order)
    }
    return Partition(groups=groups, load=loads, bound=limit, places=places, stress=stress, affinity=affinity)


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
    """Features that move as one; overlapping demands join."""
    place = {name: number for number, name in enumerate(names)}
    unit = list(range(len(names)))
    for group in together:
        unknown = [name for name in group if name not in place]
        if unknown:
            raise ValueError(f"together: {unknown} are not features of the affinity; these are {list(names)}")
        joined = {unit[place[name]] for name in group}
        unit = [min(joined) if number in joined else number for number in unit]
    return [[place for place, own in enumerate(unit) if own == first] for first in dict.fromkeys(unit)]


def _check_bound(bound: float, weights: Tensor, fullest: float, towers: int, names: Sequence[str]) -> None:
    heaviest, total = int(weights.argmax()), float(weights.sum())
    told = f"bound={bound:,.6g}"
    if float(weights[heaviest]) > bound:
        raise PartitionError(
            f"{told}: '{names[heaviest]}' alone has a load of {float(weights[heaviest]):,.6g}; raise the bound to that at least"
        )
    if total > bound * towers:
        raise PartitionError(
            f"{told}: the features' loads add up to {total:,.6g}, more than {towers} x {bound:,.6g} = {bound * towers:,.6g}; "
            f"raise the bound to {fullest:,.6g}, or take {-int(-total // bound)} towers or more"
        )
    if fullest > bound:
        raise PartitionError(
            f"{told}: no packing of {len(weights)} loads into {towers} towers was found that keeps it; the most even one has "
            f"{fullest:,.6g} in a tower: raise the bound to that, or take more towers"
        )
