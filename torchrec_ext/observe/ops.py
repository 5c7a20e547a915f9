"""waits_for_device(): whether the host waits for a GPU at an op; tensors_in(): the tensors of nested containers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def waits_for_device(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> bool:
    """Returns whether the host waits for a GPU at an op: it reads values, or the size of the result depends on them."""
    kwargs = kwargs or {}
    if torch.Tag.data_dependent_output in func.tags:
        return True
    name = func.name().partition(".")[0]
    if name in ("aten::index", "aten::index_put", "aten::index_put_"):
        # Of these, only an index by a mask depends on values.
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    devices = [each.device.type for each in tensors_in(args)]
    # copy_ takes it by position
    non_blocking = kwargs.get("non_blocking") or args[-1] is True
    if (
        name in ("aten::_to_copy", "aten::copy_")
        and devices[-1] == "cuda"
        and not non_blocking
    ):
        # The copy's target comes first, or is not among the arguments.
        target = kwargs.get("device") if len(devices) == 1 else devices[0]
        return target is not None and torch.device(target).type == "cpu"
    return (
        torch.Tag.dynamic_output_shape in func.tags
        and kwargs.get("output_size") is None
    )


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in nested containers, in order."""
    return [each for each in pytree.tree_leaves(value) if isinstance(each, Tensor)]
