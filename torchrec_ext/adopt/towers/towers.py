"""adopt_towers(): sub-networks of a user's own module at the same time, each on a rank of its own.

TowersApart: the step in place of the user's ``zero_grad``, loss, ``backward`` and ``step``. TowerWeights: the weights
that it trains on one rank each.

In a step every rank is given the same batch of B rows. It runs its own towers on all of them; one exchange brings each
rank the outputs of all towers for its share of the rows; the user's own loss function runs on that share, with the
towers' ``forward`` returning the finished outputs; one exchange takes the gradients of the outputs back. The loss and
the gradients of everything outside of the towers, weighed by the rows of each share, are summed over the ranks beside
the towers' backward. So weights are those of one process that makes the step alone, but for rounding.

A rank that raises in a step says so in the exchange that the others wait for, and all raise.

Between the exchanges a rank's part is captured where it can be: traced as one function, see :class:`CapturedStep`, cut
at the exchanges and compiled. Ranks need not be alike in that: what they exchange is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torchrec_ext.adopt.captures import Captures
from torchrec_ext.adopt.checks import check_arguments
from torchrec_ext.adopt.errors import CannotAdopt, EndOfStepError
from torchrec_ext.adopt.graph import LossFunction
from torchrec_ext.adopt.step import AdoptedStep
from torchrec_ext.adopt.towers.comparison import StepTimes, compare_with_one_process
from torchrec_ext.adopt.towers.exchange import SETTLE, OutputHeader, together
from torchrec_ext.adopt.towers.local import LocalTowers
from torchrec_ext.adopt.towers.split import TowerSplit
from torchrec_ext.adopt.towers.steps import TowerRankStep, TowersTrace
from torchrec_ext.adopt.towers.subnetworks import nothing_moves
from torchrec_ext.capture.policy import PATIENCE, Compile
from torchrec_ext.distributed.runtime import Runtime, calm_gloo


def adopt_towers(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loss: LossFunction,
    runtime: Runtime,
    towers: Mapping[str, int],
    example: Sequence[Any],
    *,
    clip_norm: float = 0.0,
    compile: Compile = "auto",  # noqa: A002
    verify: int = 3,
) -> TowersApart:
    """Runs sub-networks of the user's own module at the same time, each on a rank of its own. Collective.

    The module, its forward, the optimizer and the loss function stay the user's. Before it returns, the step is made
    on ``example`` without moving a weight, its gradients are compared with plain ones, and rank 0 prints what a step
    takes on each rank beside one process.

    Args:
        model: the user's module, with equal weights on all ranks.
        optimizer: the user's optimizer, or several.
        loss: the user's function from a batch to its loss, (), a mean over the rows; or to the loss and anything else.
            It calls the model.
        runtime: this process's rank and device.
        towers: rank of each sub-network by the path of its module, such as ``{"user": 0, "item": 1}``. Ranks may have
            several, or none: everything outside of the towers runs on all ranks, each with its share of the rows.
        example: a batch of B rows, the same on all ranks: tensors with B rows, also in tuples, lists or dicts.
        clip_norm: limit of the norm of all ranks' gradients, as of ``torch.nn.utils.clip_grad_norm_``; 0 for none.
        compile: ``auto`` captures each rank's part once eager steps have taken as long as a capture does, and says why
            where it cannot; ``require`` captures the third step, or raises; ``off`` leaves all steps eager.
        verify: number of captured steps that are compared with the eager ones on the same batch and weights.

    Returns:
        The step, called as ``loss, aux = step(*batch)`` with the same whole batch on every rank.

    Raises:
        CannotAdopt: a tower, the loss or the ranks do not allow it; the message names what and the remedy. All ranks
            raise alike.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    with nothing_moves(model, optimizers):
        split = together(
            runtime,
            lambda: TowerSplit(model, optimizers, loss, runtime, towers, example),
        )
        split.refuse_different_ranks(example)
        local = LocalTowers(split)
        times = compare_with_one_process(local, example)
    adopted = together(runtime, lambda: _adopted(local, clip_norm, compile, verify))
    calm_gloo()
    step = TowersApart(local, adopted, times)
    if runtime.is_main:
        print(step.describe(), flush=True)
    return step


class TowersApart:
    """Makes training steps in which each rank runs its own towers; made by :func:`adopt_towers`, see there.

    Attributes:
        split: what each rank runs of the model.
        adopted: this rank's steps, eager or captured.
    """

    def __init__(
        self, local: LocalTowers, adopted: AdoptedStep, times: StepTimes
    ) -> None:
        self.split = local.split
        self.adopted = adopted
        self._local = local
        self._times = times
        self._weights = TowerWeights(local.split)

    def __call__(self, *batch: Any) -> tuple[Tensor, Any]:
        """Makes one step of the user's training. Collective.

        Args:
            batch: the whole batch, the same on every rank, of the kind of ``example``.

        Returns:
            The loss of the whole batch, (), and what the loss function returned beside it for this rank's rows, see
            :meth:`share`; None where it returns the loss alone.

        Raises:
            CannotAdopt: ranks have different batches, or a batch that is not like the example.
            GradientNotFiniteError: the loss is not a number; no weight was changed.
        """
        self._local.begin(is_due=self.adopted.capture_is_due)
        guard = self._weights.guard
        was_stale = guard.stale
        guard.stale = False  # the stand-ins are called as the towers are
        try:
            return self.adopted(*batch)
        except Exception as error:
            problem = error.__cause__ if isinstance(error, EndOfStepError) else error
            assert isinstance(problem, Exception)
            # The other ranks wait for the outputs of this one, unless all have raised
            # after that exchange.
            if not self._local.exchange.met:
                self._local.exchange_outputs([], OutputHeader(failed=1.0), problem)
            raise problem from problem.__cause__
        finally:
            guard.stale = was_stale or self._local.is_writing

    def share(self, rows: int) -> slice:
        """Returns the rows of the loss function on this rank, of a batch of ``rows``."""
        return self._local.exchange.layout.share(rows)

    def settle(self) -> None:
        """Broadcasts every tower's weights, buffers and optimizer state from its rank. Collective.

        Call it on all ranks before one of them evaluates or saves. Until then the towers of other ranks refuse to run
        and to give out a ``state_dict``, and so does the optimizer.
        """
        self._local.exchange.begin(self._local.exchange.step)
        self._local.exchange_outputs([], OutputHeader(SETTLE), None)
        self.adopted.settle()
        self._weights.broadcast()

    def describe(self) -> str:
        """Describes the time of a step on each rank, compared with one process."""
        return self._times.describe(self.split)


class _Guard:
    """Refuses to show weights that another rank has trained since their last broadcast.

    A hook of modules and optimizers. A copy of a model has a guard of its own, which knows of no training.
    """

    of_adopt = True  # a hook that a captured step may leave out

    def __init__(self, text: str) -> None:
        self.text = text
        self.stale = False

    def __call__(self, *_: Any) -> None:
        if self.stale:
            raise CannotAdopt(self.text)

    def __reduce__(self) -> tuple[type[_Guard], tuple[str]]:
        # To copy or to save a model is to read its weights.
        self()
        return type(self), (self.text,)


class TowerWeights:
    """Refuses to show the old weights of other ranks' towers, and brings them up to date.

    Args:
        split: what each rank runs of the model.

    Attributes:
        guard: its ``stale`` says whether towers of other ranks have old weights.
    """

    def __init__(self, split: TowerSplit) -> None:
        self._split = split
        others = [tower for tower in split.towers if tower not in split.local]
        names = " and ".join(
            f"{tower.path!r} (trained on rank {tower.rank})" for tower in others
        )
        self.guard = _Guard(
            f"rank {split.runtime.rank} has old weights of {names}: call step.settle() on all ranks after the last "
            "step, before one of them evaluates or saves"
        )
        if not others:
            return
        for tower in others:
            tower.module.register_forward_pre_hook(self.guard)
            tower.module.register_state_dict_pre_hook(self.guard)  # type: ignore[no-untyped-call]
        for optimizer in split.optimizers:
            optimizer.register_state_dict_pre_hook(self.guard)

    def broadcast(self) -> None:
        """Broadcasts every tower's weights, buffers and optimizer state from its rank. Collective."""
        for tower in self._split.towers:
            # .data, because a parameter that requires a gradient is not written in
            # place.
            for tensor in (*tower.module.parameters(), *tower.module.buffers()):
                self._broadcast(tensor.data, tower.rank)
            for optimizer in self._split.optimizers:
                self._broadcast_state(
                    optimizer, list(tower.module.parameters()), tower.rank
                )
        self.guard.stale = False

    def _broadcast(self, tensor: Tensor, rank: int) -> None:
        message = tensor.to(self._split.runtime.device).contiguous()
        dist.broadcast(message, src=rank)
        if message is not tensor:
            tensor.copy_(message)

    def _broadcast_state(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], rank: int
    ) -> None:
        """Broadcasts the state that an optimizer has of some parameters."""
        runtime = self._split.runtime
        # First what there is: numbers themselves, and the forms of tensors.
        forms = []
        for parameter in parameters:
            form: dict[str, Any] = {}
            for key, value in optimizer.state.get(parameter, {}).items():
                form[key] = False, value
                if isinstance(value, Tensor):
                    form[key] = True, (value.shape, value.dtype, value.device.type)
            forms.append(form)
        message: list[Any] = [forms]
        dist.broadcast_object_list(message, src=rank, device=runtime.device)
        for parameter, form in zip(parameters, message[0], strict=True):
            if runtime.rank != rank:
                optimizer.state.pop(parameter, None)
            for key, (is_tensor, value) in form.items():
                if not is_tensor:
                    optimizer.state[parameter][key] = value
                    continue
                if runtime.rank != rank:
                    shape, dtype, device = value
                    # Adam counts its steps on the CPU, also for parameters on a GPU.
                    place = "cpu" if device == "cpu" else parameter.device
                    optimizer.state[parameter][key] = torch.empty(
                        shape, dtype=dtype, device=place
                    )
                self._broadcast(optimizer.state[parameter][key], rank)


def _adopted(
    local: LocalTowers, clip_norm: float, compile_: Compile, verify: int
) -> AdoptedStep:
    """Returns this rank's steps, after a check of the user's settings."""
    check_arguments(clip_norm, compile_, verify=verify)
    rank_step = TowerRankStep(local, clip_norm=float(clip_norm), compile_=compile_)

    def trace(captures: Captures, selects: bool) -> TowersTrace:
        return TowersTrace(captures, local, selects=selects)

    return AdoptedStep(
        rank_step, trace, rows=None, compile_=compile_, verify=verify, patience=PATIENCE
    )
