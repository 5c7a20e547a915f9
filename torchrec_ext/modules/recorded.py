"""Recorded: a module that remembers the arguments it was made with, so that an equal one can be made elsewhere."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import nn
from typing_extensions import Self


class Made(NamedTuple):
    """How a module was made: its class and the arguments by name, those with their default left out; None where it does not say."""

    kind: type[nn.Module]
    arguments: dict[str, Any] | None


class Recorded:
    """Put before ``nn.Module`` among the bases: ``arguments`` then holds what the constructor was called with, by name.

    That is what :mod:`torchrec_ext.retrieval.architecture` writes down, whatever becomes of the module: a plan may put sharded
    collections in the place of its tables.

    Example:
        >>> class Doubling(Recorded, nn.Module):
        ...     def __init__(self, width: int, *, bias: bool = True) -> None:
        ...         super().__init__()
        >>> Doubling(4, bias=False).arguments
        {'width': 4, 'bias': False}
    """

    arguments: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remembers; a copy is made without arguments, and then given those of the original as all its attributes."""
        made = super().__new__(cls)
        bound = inspect.signature(cls.__init__).bind_partial(made, *args, **kwargs).arguments
        made.__dict__["arguments"] = dict(list(bound.items())[1:])
        return made


def how_made(module: nn.Module) -> Made:
    """Its class, and the arguments where it is :class:`Recorded`."""
    return Made(type(module), module.arguments if isinstance(module, Recorded) else None)
