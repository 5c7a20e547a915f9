"""Places in a plane from distances, and k-means of places under a bound of the load."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STARTS, ROUNDS = 16, 100


def packed(weights: Tensor, towers: int) -> Tensor:
    """An even packing: the heaviest first, each into the tower that has least (Graham 1969), and every tower gets something."""
    own, full = torch.zeros(len(weights), dtype=torch.int64), [(0.0, 0, number) for number in range(towers)]
    for place in weights.argsort(descending=True, stable=True).tolist():
        load, count, number = min(full)
        own[place] = number
        full[full.index((load, count, number))] = (load + float(weights[place]), count + 1, number)
    return own


def plane(distances: Tensor, rounds: int = 300) -> tuple[Tensor, float]:
    """(F, 2) places whose distances are as near as can be to ``distances`` (F, F), and their stress (Kruskal's stress 1).

    SMACOF (de Leeuw 1977), which lowers the stress in every round, from the classical scaling.
    """
    count = len(distances)
    centring = torch.eye(count, dtype=distances.dtype) - 1 / count
    values, vectors = torch.linalg.eigh(-0.5 * centring @ distances.square() @ centring)
    places = (vectors[:, -2:] * values[-2:].clamp(min=0).sqrt()).flip(1)
    if places.shape[1] < 2:
        places = torch.nn.functional.pad(places, (0, 2 - places.shape[1]))
    for _ in range(rounds):
        ratio = distances / torch.cdist(places, places).clamp(min=1e-9)
        ratio.fill_diagonal_(0)
        places = (torch.diag(ratio.sum(dim=1)) - ratio) @ places / count
    found = torch.cdist(places, places)
    total = float(found.square().sum())
    return places, float((found - distances).square().sum() / total) ** 0.5 if total else 0.0


def bounded_k_means(
    places: Tensor, sizes: Tensor, weights: Tensor, bound: float, packing: Tensor, towers: int, seed: int
) -> Tensor:
    """The tower of each unit: of several starts the one with the least sum of squares that keeps the bound."""
    generator = torch.Generator().manual_seed(seed)
    state = _Clusters(places=places, sizes=sizes, weights=weights, bound=bound + 1e-9 * abs(bound), towers=towers)
    best, least = packing, float("inf")
    for start in range(STARTS):
        own = state.greedy(_spread(places, towers, generator)) if start else packing
        if own is None:
            own = packing
        own, cost = state.improved(own)
        if cost < least - 1e-12:
            best, least = own, cost
    return best


def _spread(places: Tensor, towers: int, generator: torch.Generator) -> Tensor:
    """Centres as k-means++ draws them (Arthur and Vassilvitskii 2007)."""
    chosen = [int(torch.randint(len(places), (1,), generator=generator))]
    while len(chosen) < towers:
        nearest = torch.cdist(places, places[chosen]).amin(dim=1).square() + 1e-12
        nearest[chosen] = 0
        chosen.append(int(torch.multinomial(nearest, 1, generator=generator)))
    return places[chosen]


@dataclass(frozen=True, kw_only=True)
class _Clusters:
    places: Tensor
    sizes: Tensor
    weights: Tensor
    bound: float
    towers: int

    def greedy(self, centres: Tensor) -> Tensor | None:
        """Each to the nearest centre that still has room, who loses most by another one first; None where one is left over."""
        far = torch.cdist(self.places, centres)
        two = far.topk(min(2, self.towers), dim=1, largest=False).values
        own, room = torch.zeros(len(far), dtype=torch.int64), [self.bound] * self.towers
        empty = set(range(self.towers))
        order = (two[:, -1] - two[:, 0]).argsort(descending=True, stable=True).tolist()
        for turn, place in enumerate(order):
            must = empty if len(order) - turn == len(empty) else range(self.towers)
            fitting = [number for number in must if room[number] >= float(self.weights[place])]
            if not fitting:
                return None
            number = min(fitting, key=lambda number: float(far[place, number]))
            own[place] = number
            room[number] -= float(self.weights[place])
            empty.discard(number)
        return own

    def improved(self, own: Tensor) -> tuple[Tensor, float]:
        """Moves one unit, or swaps two, as long as that brings them nearer to the middles of their towers and keeps the bound."""
        own = own.clone()
        cost = self.cost(own)
        for _ in range(ROUNDS):
            far = self.sizes[:, None] * torch.cdist(self.places, self.middles(own)).square()  # (U, T)
            while self._best_change(own, far):
                pass
            before, cost = cost, self.cost(own)  # middles moved: never dearer
            if cost >= before - 1e-12:
                break
        return own, cost

    def _best_change(self, own: Tensor, far: Tensor) -> bool:
        """Makes the allowed change that gains most by the distances ``far`` (U, T), if any gains."""
        loads = torch.zeros(self.towers, dtype=torch.float64).index_add_(0, own, self.weights)
        mine = far.gather(1, own[:, None])  # (U, 1)
        moves = mine - far
        moves[
            (loads[None] + self.weights[:, None] > self.bound) | (torch.bincount(own, minlength=self.towers)[own] < 2)[:, None]
        ] = -1
        theirs = far[:, own]  # (U, U): each unit's distance to the other's tower
        swaps = mine + mine.T - theirs - theirs.T
        after = loads[own][:, None] + self.weights[None] - self.weights[:, None]
        swaps[(after > self.bound) | (after > self.bound).T | (own[:, None] == own[None])] = -1
        if max(float(moves.max()), float(swaps.max())) <= 1e-12:
            return False
        if moves.max() >= swaps.max():
            place, number = divmod(int(moves.argmax()), self.towers)
            own[place] = number
        else:
            place, other = divmod(int(swaps.argmax()), len(own))
            own[[place, other]] = own[[other, place]]
        return True

    def middles(self, own: Tensor) -> Tensor:
        """(T, 2) the mean place of each tower's features."""
        one_hot = torch.nn.functional.one_hot(own, self.towers).double() * self.sizes[:, None]
        return (one_hot.T @ self.places) / one_hot.sum(dim=0).clamp(min=1e-12)[:, None]

    def cost(self, own: Tensor) -> float:
        """The sum over features of the squared distance to the middle of their tower."""
        return float((self.sizes * (self.places - self.middles(own)[own]).square().sum(dim=1)).sum())
