"""NamedData: what every task says of its data in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class NamedData:
    """A task over ``data``, which has a name, a licence and the best figures that can be reached where they are known."""

    data: Any

    @property
    def name(self) -> str:
        """Of the set."""
        return str(self.data.name)

    @property
    def licence(self) -> str | None:
        """What the publisher asks."""
        licence: str | None = self.data.licence
        return licence

    @property
    def best(self) -> Mapping[str, float]:
        """The best possible figures of generated data."""
        best: Mapping[str, float] = self.data.best
        return best
