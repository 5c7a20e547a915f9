"""Towers of one rank on CUDA streams of their own: small kernels of several towers fill the GPU together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import get_unwrapped_module

from torchrec_ext.modules.tower import Towers


class TowerStreams:
    """Runs each tower on a stream of its own: its forward, and its backward, which autograd runs there too.

    A tower's stream waits for the stream that made its inputs; the caller's stream waits for all towers when the last
    one has been launched, and again when a backward ends, so that tables and gradients are complete for their readers.
    Events do both: the host never waits.

    Args:
        towers: towers of one rank, called as one module.
        cuda: module that makes and switches streams, ``torch.cuda``.
    """

    def __init__(self, towers: Towers, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._streams = {name: cuda.Stream() for name in towers}
        self._callers: list[Any] = []
        self._running: list[str] = []
        self._handles = [towers.register_forward_hook(self._join, always_call=True)]
        for name, tower in towers.items():
            self._handles += [
                tower.register_forward_pre_hook(self._entering(name)),
                tower.register_forward_hook(self._left, always_call=True),
            ]

    def remove(self) -> None:
        """Lets the towers run one after the other again."""
        for handle in self._handles:
            handle.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            caller = self._cuda.current_stream()
            stream = self._streams[name]
            stream.wait_stream(caller)
            self._callers.append(caller)
            self._running.append(name)
            self._cuda.set_stream(stream)

        return enter

    def _left(self, tower: nn.Module, inputs: Any, output: Any) -> None:
        caller = self._callers.pop()
        self._cuda.set_stream(caller)
        # There is no tensor if the tower raised.
        if isinstance(output, Tensor):
            output.record_stream(caller)
            if output.requires_grad:
                output.register_hook(self._join_after_backward)  # type: ignore[no-untyped-call]

    def _join(self, *_: Any) -> None:
        """Makes the caller's stream wait for every tower."""
        for name in self._running:
            self._cuda.current_stream().wait_stream(self._streams[name])
        self._running.clear()

    def _join_after_backward(self, _: Tensor) -> None:
        """Makes the caller's stream wait for all towers when the backward ends.

        Autograd itself waits only for streams with gradients; a table's optimizer in the backward leaves none.
        """
        names = list(self._streams)

        # A callback that autograd runs last of all: the backward of other towers may
        # still be ahead.
        def join() -> None:
            for name in names:
                self._cuda.current_stream().wait_stream(self._streams[name])

        torch.autograd.Variable._execution_engine.queue_callback(join)


def on_streams(model: nn.Module, device: torch.device) -> TowerStreams | str:
    """Puts the towers of ``model`` on streams of their own.

    Args:
        model: model that holds a :class:`Towers`, sharded or not.
        device: device of the model.

    Returns:
        The streams, or, where there can be none, a line that says why: the towers then run one after the other.
    """
    towers = next(
        (
            module
            for module in get_unwrapped_module(model).modules()
            if isinstance(module, Towers)
        ),
        None,
    )
    if device.type != "cuda":
        return (
            f"streams: the towers run one after the other: {device.type} has no streams"
        )
    if towers is None or len(towers) < 2:
        return "streams: nothing to run beside one another: this rank has no two towers that every rank runs"
    return TowerStreams(towers)
