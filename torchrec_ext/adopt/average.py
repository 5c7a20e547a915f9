"""StepAverage: a moving average of the weights, a user's AveragedModel, that is updated in each step.

After an eager step it is torch's own ``update_parameters``. A captured step has the averages of the parameters that it
moves as one more tensor of their state, so that a table and its average are updated row by row together. What else
the user averages, such as buffers and frozen parameters, torch updates after the captured step too.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
    get_swa_multi_avg_fn,
)

from torchrec_ext.adopt.errors import CannotAdopt

# the greatest float32 below 1: the logarithm of what is left of an average must be
# finite
_COPY = 1 - 2.0**-24


class StepAverage:
    """The average of a model's weights, updated in each step.

    Args:
        averaged: the user's AveragedModel; from now on it refuses calls of ``update_parameters``.
        model: the user's model.

    Raises:
        CannotAdopt: it is no AveragedModel of this model with a rule that steps know.
    """

    def __init__(self, averaged: Any, model: nn.Module) -> None:
        if type(averaged) not in (AveragedModel, _AveragedInSteps):
            raise CannotAdopt(
                f"average is a {type(averaged).__name__}; give "
                "torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(.999))"
            )
        self._averaged = averaged
        self._model = model
        self.check()
        # The object stays the user's, who saves and evaluates it.
        averaged.__class__ = _AveragedInSteps

    def check(self) -> None:
        """Looks at the AveragedModel as it is now.

        Raises:
            CannotAdopt: a captured step has no form of it; the message names what.
        """
        averaged = self._averaged
        self._count = 0
        self._version = -1  # of the tensor that counts
        self._equal: dict[
            str, tuple[int, int]
        ] = {}  # versions of frozen parameters that their averages equal
        self._decay = _decay_of(averaged)
        self._functions = averaged.avg_fn, averaged.multi_avg_fn
        of_model = dict(self._model.named_parameters())
        self._of_average: dict[str, nn.Parameter] = dict(
            averaged.module.named_parameters()
        )
        for name in of_model | self._of_average:
            form = _form(self._of_average.get(name))
            form_of_model = _form(of_model.get(name))
            if form != form_of_model:
                raise CannotAdopt(
                    f"average has '{name}' as {form} and the model as {form_of_model}; make it of the model that you "
                    "adopt, and on its device: AveragedModel(model)"
                )
        self._pairs = {
            name: (self._of_average[name], parameter)
            for name, parameter in of_model.items()
        }
        self._addresses = [
            (parameter, parameter.data_ptr()) for parameter in self._of_average.values()
        ]
        # All dicts that hold a module, a weight or n_averaged, each with what it holds
        # now.
        places: list[dict[str, Any]] = [averaged._buffers]
        for module in averaged.modules():
            places += [module._modules, module._parameters]
        self._places = [(values, dict(values)) for values in places]

    def change(self) -> str:
        """Names what was replaced since :meth:`check`; empty if nothing was. Tensors must not lag."""
        averaged = self._averaged
        if (averaged.avg_fn, averaged.multi_avg_fn) != self._functions:
            return "the rule of the average"
        is_replaced = False
        for values, before in self._places:
            is_replaced |= not all(
                map(operator.is_, map(values.get, before), before.values())
            )
        if is_replaced or any(
            parameter.data_ptr() != address for parameter, address in self._addresses
        ):
            return "a weight of the average"
        return ""

    def refuse_in(self, tensors: Sequence[Any]) -> None:
        """Refuses a graph that reads averages among its inputs, because the step updates them later.

        Raises:
            CannotAdopt: it reads one.
        """
        inputs = set(map(id, tensors))
        for name, parameter in self._of_average.items():
            if id(parameter) in inputs:
                raise CannotAdopt(
                    f"the loss reads the average of '{name}'; leave average= out, and call "
                    "averaged.update_parameters(model) after each step"
                )

    def of(self, name: str) -> nn.Parameter:
        """Returns the average of a parameter by its name in the model."""
        return self._of_average[name]

    def update(self) -> None:
        """Averages all weights after an eager step."""
        AveragedModel.update_parameters(self._averaged, self._model)

    def rate(self) -> float:
        """Returns the share of the new weights in the average of the next step."""
        count = self._averaged.n_averaged
        # On a GPU, reading it at each step would wait for the device.
        if count._version != self._version:
            self._count = int(count)
            self._version = count._version
        # The first update copies the weights.
        if not self._count:
            return _COPY
        if self._decay:
            return 1 - self._decay
        return 1 / (self._count + 1)

    @torch.no_grad()
    def end_step(self, updated: Collection[str]) -> None:
        """Averages the rest after a captured step, and counts the step.

        Args:
            updated: names of the parameters that the step has averaged.
        """
        averaged = self._averaged
        rest: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        for name, (average, parameter) in self._pairs.items():
            # Before any look at a tensor: a version that is read updates the rows that
            # are behind.
            if name in updated:
                continue
            # The average of equal tensors is the same again.
            if self._equal.get(name) != (average._version, parameter._version):
                rest[name] = average, parameter
        pairs: list[tuple[Tensor, Tensor]] = list(rest.values())
        buffers = zip(averaged.module.buffers(), self._model.buffers(), strict=True)
        if averaged.use_buffers:
            pairs += buffers
        else:
            # As torch does: buffers that are not averaged are copied.
            for of_average, of_model in buffers:
                of_average.copy_(of_model)
        if pairs:
            # torch averages some tensors, each paired with its average, and counts one
            # more step.
            averages, values = zip(*pairs, strict=True)
            part: Any = SimpleNamespace(**vars(averaged))
            part.n_averaged = averaged.n_averaged
            part.use_buffers = True  # otherwise torch copies buffers besides
            part.module = SimpleNamespace(parameters=lambda: averages, buffers=tuple)
            part_of_model: Any = SimpleNamespace(
                parameters=lambda: values, buffers=tuple
            )
            AveragedModel.update_parameters(part, part_of_model)
        else:
            averaged.n_averaged += 1
        for name, (average, parameter) in rest.items():
            if not parameter.requires_grad and torch.equal(average, parameter):
                self._equal[name] = average._version, parameter._version
        self._count += 1
        self._version = averaged.n_averaged._version


class _AveragedInSteps(AveragedModel):
    """An AveragedModel that an adopted step updates; a copy of it is a plain one again."""

    def update_parameters(self, model: nn.Module) -> None:
        """Refuses the call: each average would count twice."""
        raise CannotAdopt(
            "averaged.update_parameters(model): adopt(..., average=averaged) does this in each step; leave the call "
            "out, or call it on copy.deepcopy(averaged)"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (AveragedModel,), vars(self)


def _decay_of(averaged: AveragedModel) -> float:
    """Returns the decay of an exponential average; 0 for the equal average of all steps.

    Raises:
        CannotAdopt: it is another average.
    """
    function = averaged.multi_avg_fn or averaged.avg_fn
    if function is None:
        return 0.0
    # torch decorates its functions with no_grad(), and makes each anew: their code
    # tells them apart.
    plain = inspect.unwrap(function)
    code = getattr(plain, "__code__", None)
    if code in _codes(get_swa_multi_avg_fn, get_swa_avg_fn):
        return 0.0
    if code not in _codes(get_ema_multi_avg_fn, get_ema_avg_fn):
        name = getattr(plain, "__name__", type(plain).__name__)
        raise CannotAdopt(
            f"average is made by {name}(), which a captured step does not know; give AveragedModel(model, "
            "multi_avg_fn=get_ema_multi_avg_fn(.999)), or no function"
        )
    decay = inspect.getclosurevars(plain).nonlocals["decay"]
    if not (isinstance(decay, int | float) and 0 < decay < 1):
        raise CannotAdopt(
            f"average has decay={decay!r}; must be a number between 0 and 1, such as .999"
        )
    return float(decay)


def _codes(*makers: Callable[[], Any]) -> list[Any]:
    """Returns the code of the functions that torch makes."""
    return [inspect.unwrap(make()).__code__ for make in makers]


def _form(tensor: Tensor | None) -> str:
    return (
        "none"
        if tensor is None
        else f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
    )
