"""LookUp: the hook by which an embedding takes ids instead of rows, in a model, in its copies and in a saved model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchrec_ext.ids.index import EMPTY


class LookUp:
    """Forward pre-hook of an embedding, with keyword arguments, that turns ids into rows.

    Args:
        path: path of the embedding.

    Attributes:
        is_on: whether the embedding takes ids still.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_on = True

    def __call__(
        self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Returns the arguments of forward with rows for ids."""
        # Without ids forward says what it lacks.
        if not self.is_on or not (inputs or "input" in named):
            return None
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"'{self.path}' has dynamic ids, which a compiled model cannot count; compile the rest of it"
            )
        if inputs:
            return (self.rows(module, inputs[0]), *inputs[1:]), named
        return inputs, {**named, "input": self.rows(module, named["input"])}

    def rows(self, module: nn.Module, ids: Any) -> Tensor:
        """Returns the rows of ids, of the same shape."""
        raise NotImplementedError


class SavedLookUp(LookUp):
    """Reads the rows that ids had when a model was saved whole, and admits none.

    Args:
        path: path of the embedding.
        ids: ids with a row, (n,) int64.
        rows: their rows, (n,) int64.
    """

    def __init__(self, path: str, ids: Tensor, rows: Tensor) -> None:
        super().__init__(path)
        # The reserved id has no row, and no place is searched in an empty tensor.
        self._ids, order = torch.cat([ids, ids.new_tensor([EMPTY])]).sort()
        self._rows = torch.cat([rows, rows.new_zeros(1)])[order]

    def rows(self, module: nn.Module, ids: Any) -> Tensor:
        """Returns the rows of ids, of the same shape; 0 for an id without a row."""
        check_reads(self.path, module)
        raw = raw_ids(self.path, module, ids)
        places = torch.searchsorted(self._ids, raw).clamp(max=len(self._ids) - 1)
        rows = torch.where(self._ids[places] == raw, self._rows[places], 0)
        return rows.to(ids.device)


def check_reads(path: str, module: nn.Module) -> None:
    """Refuses to train a copy, whose new ids would all be row 0.

    Raises:
        ValueError: the embedding is in training mode, with gradients.
    """
    assert isinstance(module.weight, Tensor)
    if module.training and module.weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"'{path}' is of a copy, which reads dynamic ids and admits none: call eval() or no_grad(); to train it, "
            "build the model anew"
        )


def raw_ids(path: str, module: nn.Module, ids: Any) -> Tensor:
    """Returns the ids that an embedding is called with as int64 in the host's memory; padding is the reserved id.

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
    raw = ids.long().cpu()
    if module.padding_idx is not None:
        raw = torch.where(raw == 0, EMPTY, raw)
    return raw


def look_up_of(module: nn.Module) -> LookUp | None:
    """Returns the hook of an embedding that takes ids instead of rows; None if it takes rows."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, LookUp) and hook.is_on:
            return hook
    return None


def path_with_dynamic_ids(model: nn.Module) -> str | None:
    """Returns the path of the first embedding that takes ids instead of rows; None if there is none."""
    paths = (str(path) for path, module in model.named_modules() if look_up_of(module))
    return next(paths, None)
