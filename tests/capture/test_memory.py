"""Rows that lag behind between captured steps are updated in blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.capture.test_captured import KINDS, sharded, stepped
from tests.contracts import gather_state, run_ranks
from tests.examples import USERS, batches
from torchrec_ext.capture import memory as step_memory
from torchrec_ext.capture.captured import CapturedStep
from torchrec_ext.capture.executors import as_it_is
from torchrec_ext.distributed.runtime import Runtime


class _Largest(TorchDispatchMode):
    """The rows of the largest matrix that any op makes."""

    rows = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        in_place = (
            func._schema.name.endswith("_")
            or func._schema.is_mutable
            or not isinstance(made, Tensor)
            or made._is_view()
        )
        if not in_place and made.dim() == 2:
            self.rows = max(self.rows, len(made))
        return made


def settled(runtime: Runtime, block: int) -> tuple[dict[str, Tensor] | None, int]:
    """Weights of tables moved row by row, updated ``block`` rows at a time; and the rows of the largest temporary."""
    model, optimizer = sharded(runtime, *KINDS[0])
    first, *rest = batches(12)
    stepped(model, optimizer, first)
    step = CapturedStep(model, optimizer, as_it_is, rule=lambda *_: True)
    for batch in rest:
        step(batch)
    step_memory._BLOCK_ROWS = block
    with _Largest() as largest:
        step.settle()
    return gather_state(model), largest.rows


def in_blocks(runtime: Runtime) -> list[Any]:
    return [settled(runtime, block) for block in (1 << 30, 16, 7)]


def test_rows_brought_up_to_date_in_blocks_are_those_of_one_sweep_bit_for_bit() -> None:
    (((whole, rows), *others),) = run_ranks(in_blocks, 1)
    assert rows == USERS
    assert [largest for _, largest in others] == [16, 7]
    for other, _ in others:
        assert all(torch.equal(other[name], value) for name, value in whole.items())
