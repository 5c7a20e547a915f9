"""LookUp: the hook by which an embedding takes ids instead of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torchrec_ext.ids.index import EMPTY


class LookUp:
    """Forward pre-hook of an embedding, with keyword arguments, that turns ids into rows.

    Args:
        path: path of the embedding.
        rows: returns the rows of ids, of the same shape.
    """

    def __init__(self, path: str, rows: Callable[[str, Any], Tensor]) -> None:
        self._path = path
        self._rows = rows

    def __call__(
        self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Returns the arguments of forward with rows for ids."""
        # Without ids forward says what it lacks.
        if not (inputs or "input" in named):
            return None
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"'{self._path}' has dynamic ids, which a compiled model cannot count; compile the rest of it"
            )
        if inputs:
            return (self._rows(self._path, inputs[0]), *inputs[1:]), named
        return inputs, {**named, "input": self._rows(self._path, named["input"])}

    def __reduce__(self) -> NoReturn:
        # Rows of a copy would stay those of ids that have left.
        raise ValueError(
            f"'{self._path}' has dynamic ids, so the model is not copied or saved whole; load the three state_dicts "
            "into new ones, or call remove() of its DynamicEmbeddings"
        )


def raw_ids(path: str, module: nn.Module, ids: Any) -> Tensor:
    """Returns the ids that an embedding is called with as int64; padding is the reserved id.

    Raises:
        ValueError: ids that are no whole numbers.
    """
    if not isinstance(ids, Tensor):
        kind = type(ids).__name__
        raise ValueError(
            f"'{path}': ids are a {kind}, must be a tensor; make ids of strings by string_ids()"
        )
    if ids.is_floating_point():
        raise ValueError(
            f"'{path}': ids are {ids.dtype}, must be whole numbers; convert them where they are read"
        )
    raw = ids.long()
    if module.padding_idx is not None:
        raw = torch.where(raw == 0, EMPTY, raw)
    return raw


def has_look_up(module: nn.Module) -> bool:
    """Whether an embedding takes ids instead of rows."""
    return any(isinstance(hook, LookUp) for hook in module._forward_pre_hooks.values())


def path_with_dynamic_ids(model: nn.Module) -> str | None:
    """Returns the path of the first embedding that takes ids instead of rows; None if there is none."""
    paths = (str(path) for path, module in model.named_modules() if has_look_up(module))
    return next(paths, None)
