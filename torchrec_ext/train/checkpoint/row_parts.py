"""How a number per row moves between tables whose columns are split differently."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def inherited(saved: Tensor, widths: Sequence[int], start: int, stop: int) -> Tensor:
    """The number that a part of the columns inherits: the mean, over its columns, of the number of the saved part of each.

    A table whose columns are split keeps one sum of squared gradients (their mean over the part's columns) for each part. The mean
    over the parts, weighted by their widths, is the sum that the whole table would have kept for the same gradients; a part of a
    whole, or of another part, starts from the sum of what it was a part of.

    Args:
        saved: (n, P), of n rows and P parts.
        widths: columns of each part, in order.
        start: first column of the part that inherits, and
        stop: the one after its last.

    Returns:
        (n, 1).

    Example:
        >>> inherited(torch.tensor([[1.0, 3.0]]), (8, 8), 0, 16), inherited(torch.tensor([[1.0, 3.0]]), (8, 8), 8, 12)
        (tensor([[2.]]), tensor([[3.]]))
    """
    ends = list(accumulate(widths))
    shared = [min(stop, end) - max(start, end - width) for width, end in zip(widths, ends, strict=True)]
    weights = torch.tensor([max(columns, 0) for columns in shared], dtype=torch.float64) / (stop - start)
    return (saved.double() @ weights.to(saved.device)).to(saved.dtype).unsqueeze(1)
