"""Checks that a user's model, optimizers and step can be captured exactly, and names what cannot.

check_model(), update_rules(): what is known before the first step.

ForwardWatch: observes in one eager forward what no graph shows.

Changes: finds what a user changed between two captured steps.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.overrides import TorchFunctionMode

from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.reads import is_plain, look_up_arguments
from torchrec_ext.distributed.optim.config import Choice
from torchrec_ext.ids.look_ups import path_with_dynamic_ids
from torchrec_ext.observe.ops import tensors_in
from torchrec_ext.observe.state_copy import random_state
from torchrec_ext.observe.user_lines import module_line

_WRAPPERS = {
    "DistributedDataParallel": "adopt its .module, and average ranks every few steps (local SGD) in place of DDP",
    "DistributedModelParallel": "its tables exchange ids in each step, which no captured step does; train it as it is",
    "FullyShardedDataParallel": "adopt the module inside it, on one rank",
    "DataParallel": "adopt its .module",
    "OptimizedModule": "adopt the module that you gave to torch.compile: the step is compiled as a whole",
    "RecursiveScriptModule": "adopt the module that you gave to torch.jit.script",
}
_HOOKS = {
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
# Hooks on all modules, which no graph of Dynamo's has and no guard sees. Those on what is
# registered run in no step; a failed torch.export of torch 2.11 leaves one.
GLOBAL_HOOKS = [
    hooks
    for name, hooks in vars(torch.nn.modules.module).items()
    if name.startswith("_global_")
    and name.endswith("hooks")
    and "registration" not in name
    and isinstance(hooks, dict)
]
HOOK_ON_GRADIENT = (
    "has a hook on its gradient, whose Python a captured step would not run; put it into the loss, or give "
    "clip_norm="
)


def check_model(model: nn.Module) -> None:
    """Checks what of a model is known before a step.

    Raises:
        CannotAdopt: a module or parameter does what a captured step would not; the message names it.
    """
    # A line is looked for where there is something to say: Python parses the file of
    # the class for it.
    for path, module in model.named_modules():
        fault = fault_of_module(module)
        if fault:
            raise CannotAdopt(f"{module_line(model, path)} {fault}")
    if any(GLOBAL_HOOKS):
        raise CannotAdopt(
            "torch has a hook on all modules, whose Python a captured step would not run; remove it"
        )
    for path, parameter in model.named_parameters():
        fault = _fault_of_parameter(parameter)
        if fault:
            raise CannotAdopt(f"{module_line(model, path)} {fault}")
    devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        raise CannotAdopt(
            f"the model is on {' and '.join(sorted(devices))}; put it on one device"
        )


def fault_of_module(module: nn.Module) -> str:
    """Names an effect of a module in a step that a capture would lose; empty if there is none."""
    kind = type(module).__name__
    if kind in _WRAPPERS:
        return f"is a {kind}: {_WRAPPERS[kind]}"
    for attribute, hook in _HOOKS.items():
        if getattr(module, attribute):
            return f"has a {hook}, whose Python a captured step would not run; remove it, or write it into forward"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return _fault_of_table(module)
    return ""


def _fault_of_table(module: nn.Embedding | nn.EmbeddingBag) -> str:
    if module.max_norm is not None:
        return (
            f"has max_norm={module.max_norm:g}, so that forward rewrites rows; leave it out, and limit the rows that "
            "are read, as by F.normalize"
        )
    if module.scale_grad_by_freq:
        return "has scale_grad_by_freq=True, which divides a row's gradient by its look-ups; leave it out"
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        return "has mode='max'; take 'sum' or 'mean', or nn.Embedding and .amax(1)"
    return ""


def _fault_of_parameter(parameter: nn.Parameter) -> str:
    # By the class itself: a lazy parameter is derived from it.
    if type(parameter) not in (nn.Parameter, Tensor):
        return f"is a {type(parameter).__name__}, not a plain parameter; run one forward first if it is lazy"
    if parameter.dtype != torch.float32 and parameter.requires_grad:
        return (
            f"is {parameter.dtype}; weights are trained in torch.float32: call model.float(), and give autocast= to "
            "compute in 16 bits"
        )
    return HOOK_ON_GRADIENT if has_gradient_hook(parameter) else ""


def has_gradient_hook(parameter: Tensor) -> bool:
    """Whether Python runs when a gradient of a parameter is ready."""
    return bool(
        parameter._backward_hooks
        or getattr(parameter, "_post_accumulate_grad_hooks", None)
    )


_KINDS: dict[type[Optimizer], str] = {
    Adam: "adam",
    AdamW: "adam",
    Adagrad: "adagrad",
    SGD: "sgd",
}
STATES = {"adam": ("exp_avg", "exp_avg_sq"), "adagrad": ("sum",), "sgd": ()}
_REFUSED = {
    "amsgrad": "set amsgrad=False",
    "momentum": "set momentum=0, or take Adam with betas=(momentum, .999)",
    "nesterov": "set nesterov=False",
    "dampening": "set dampening=0",
    "maximize": "set maximize=False and negate the loss",
    "differentiable": "set differentiable=False",
    "lr_decay": "set lr_decay=0 and take a scheduler, LambdaLR for one",
}
# A captured step is compiled with these. The learning rate alone is read in each step.
_FIXED = ("betas", "eps", "weight_decay", "decoupled_weight_decay", *_REFUSED)


# Of each parameter that an optimizer moves, by name: optimizer, group, the parameter
# and its rule.
Rules = dict[str, tuple[int, int, nn.Parameter, Choice]]


def update_rules(model: nn.Module, optimizers: Sequence[Optimizer]) -> Rules:
    """Returns for each parameter that an optimizer moves, by name: optimizer, group, the parameter and its rule.

    Raises:
        CannotAdopt: an optimizer or a setting has no captured form, or a parameter is not the model's.
    """
    path = path_with_dynamic_ids(model)
    if path is not None:
        raise CannotAdopt(
            f"'{path}' has dynamic ids, which a captured step cannot count; map the ids of each batch by DynamicIds "
            "before the step, see docs/ids.md"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rules: Rules = {}
    for number, optimizer in enumerate(optimizers):
        kind = update_kind(optimizer)
        _check_calls(optimizer)
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    raise CannotAdopt(
                        f"group {index} of {type(optimizer).__name__} has a parameter of shape "
                        f"{tuple(parameter.shape)} that is not the model's; put all modules of the loss into one: "
                        "adopt(nn.ModuleList([model, other]), ...)"
                    )
                if name in rules:
                    raise CannotAdopt(
                        f"{module_line(model, name)} is moved by two optimizers; give it to one"
                    )
                rules[name] = number, index, parameter, _choice(kind, group)
    return rules


def update_kind(optimizer: Optimizer) -> str:
    """Returns a captured step's rule for the parameters of an optimizer.

    Raises:
        CannotAdopt: the optimizer or a setting of it has no captured form.
    """
    name = type(optimizer).__name__
    kind = _KINDS.get(type(optimizer))
    if kind is None:
        instead = f"those with one: {', '.join(each.__name__ for each in _KINDS)}"
        if name == "SparseAdam":
            instead = "torch.optim.Adam moves rows that few steps read as cheaply once captured"
        raise CannotAdopt(f"the optimizer {name} has no captured form; {instead}")
    for group in optimizer.param_groups:
        _check_settings(name, group)
    return kind


def _check_calls(optimizer: Optimizer) -> None:
    hook = hook_of_optimizers([optimizer])
    if hook:
        raise CannotAdopt(
            f"{hook}, whose Python a captured step would not run; remove it"
        )
    # A scheduler of torch's wraps it to count the steps, which it may do.
    if "step" in vars(optimizer) and not hasattr(
        optimizer.step, "_wrapped_by_lr_sched"
    ):
        raise CannotAdopt(
            f"{type(optimizer).__name__}.step was replaced by another function, which a captured step would not run"
        )


_OPTIMIZERS = sys.modules[Optimizer.__module__]


def hook_of_optimizers(optimizers: Sequence[Optimizer]) -> str:
    """Names a hook on steps of optimizers; empty if there is none."""
    for optimizer in optimizers:
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return f"{type(optimizer).__name__} has a step hook"
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    for hooks in map(vars(_OPTIMIZERS).__getitem__, names):
        for hook in hooks.values():
            name = getattr(hook, "__name__", type(hook).__name__)
            return f"torch.optim has a hook on all optimizers ({name})"
    return ""


def _check_settings(optimizer: str, group: Mapping[str, Any]) -> None:
    for setting, remedy in _REFUSED.items():
        if group.get(setting):
            raise CannotAdopt(
                f"{optimizer} with {setting}={group[setting]} has no captured form; {remedy}"
            )
    for setting in ("lr", "betas", "eps", "weight_decay"):
        if tensors_in(group.get(setting)):
            raise CannotAdopt(
                f"{optimizer} has a tensor for {setting}; give a float, which schedulers change as well"
            )
    if (
        group["params"]
        and group["params"][0].is_cuda
        and (group.get("fused") or group.get("capturable"))
    ):
        raise CannotAdopt(
            f"{optimizer} is fused or capturable; leave both out: the whole step is captured"
        )


def _choice(kind: str, group: Mapping[str, Any]) -> Choice:
    # A decoupled decay, as AdamW's, is of the weight itself; any other is added to the
    # gradient.
    decay = float(group.get("weight_decay", 0.0))
    decoupled = bool(group.get("decoupled_weight_decay"))
    return Choice(
        kind=kind,
        lr=float(group["lr"]),
        eps=float(group.get("eps", 0.0)),
        betas=tuple(group.get("betas", (0.0, 0.0))),
        weight_decay=decay if decoupled else 0.0,
        l2=0.0 if decoupled else decay,
    )


class StateTensor(NamedTuple):
    """A tensor of an optimizer's state: the optimizer's number, the parameter, the name and the tensor."""

    optimizer: int
    parameter: nn.Parameter
    name: str
    tensor: Tensor


class Changes:
    """Finds changes between two captured steps that no guard of Dynamo's sees.

    Args:
        optimizers: the user's optimizers, as they are when the capture begins.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._settings = self._fixed_settings()
        self._state_ids: list[int] = []

    def ending(self) -> str:
        """Names a change after which all steps stay eager; empty if there is none."""
        if self._fixed_settings() != self._settings:
            return "a setting of the optimizer other than lr (OneCycleLR: give cycle_momentum=False)"
        hook = hook_of_optimizers(self._optimizers)
        if hook:
            return f"a hook of the optimizer ({hook})"
        if any(GLOBAL_HOOKS):
            return "a hook on all modules"
        return ""

    def of_state(self, state: Sequence[StateTensor], *, is_behind: bool) -> str:
        """Names a replaced tensor of the optimizers' state, which needs another capture; empty if there is none.

        Args:
            state: the tensors of the capture.
            is_behind: whether rows are behind, so that nobody can have read, copied or loaded the state.
        """
        # Compared in every step; the loop below runs only after somebody may have
        # touched the state.
        states = [
            values
            for optimizer in self._optimizers
            for values in optimizer.state.values()
        ]
        state_ids = [id(value) for values in states for value in values.values()]
        if is_behind and state_ids == self._state_ids:
            return ""
        for number, parameter, name, tensor in state:
            if (
                self._optimizers[number].state.get(parameter, {}).get(name)
                is not tensor
            ):
                return f"the optimizer's state '{name}'"
        self._state_ids = state_ids
        return ""

    def _fixed_settings(self) -> list[list[Any]]:
        """Returns the settings of all groups that a capture fixes: all but the learning rate."""
        settings = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                settings.append([len(group["params"]), *map(group.get, _FIXED)])
        return settings


class ForwardWatch(TorchFunctionMode):
    """Surrounds the forward of one eager step, and notes what no graph shows.

    Args:
        model: the user's model.
        args: the batch.
        repeats: tensors of the batch that repeat each value, with how often.

    Attributes:
        calls: number of torch calls.
        look_ups: rows that look-ups read of each weight, by its id.
        random: whether the forward draws random numbers.
        problem: what stands in the way of a captured step; empty if nothing was seen.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        repeats: Sequence[tuple[Tensor, int]] = (),
    ) -> None:
        super().__init__()
        self.look_ups = Counter[int]()
        self._repeats = {id(leaf): count for leaf, count in repeats}
        self.calls = 0
        self.random = False
        self.problem = ""
        self._parameters = list(model.parameters())
        # Each tensor counts the writes in place, in _version.
        self._watched = [*self._parameters, *tensors_in(args)]
        self._device = self._parameters[0].device

    def __enter__(self) -> ForwardWatch:
        self._random_before = random_state(self._device)
        self._grads = [parameter.grad for parameter in self._parameters]
        self._versions = [tensor._version for tensor in self._watched]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        super().__exit__(kind, *error)  # type: ignore[no-untyped-call]
        self.random = not torch.equal(self._random_before, random_state(self._device))
        pairs = zip(self._parameters, self._grads, strict=True)
        if any(parameter.grad is not grad for parameter, grad in pairs):
            self.problem = "the loss function calls backward(); return the loss, and leave it to the step"
        elif [tensor._version for tensor in self._watched] != self._versions:
            self.problem = (
                "the loss function writes into a weight or into the batch; leave steps to the optimizer, and write "
                "into a copy"
            )

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Counts one call."""
        self.calls += 1
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in (F.embedding, F.embedding_bag):
            named = look_up_arguments(func, args, kwargs)
            if is_plain(named):
                ids = named["input"]
                self.look_ups[id(named["weight"])] += ids.numel() // self._repeats.get(
                    id(ids), 1
                )
        return result


def loss_and_output(result: Any) -> tuple[Tensor, Any]:
    """Splits the result of a user's loss function into the loss, reshaped to (), and its output.

    Raises:
        CannotAdopt: it is neither a loss nor a tuple of a loss and something else.
    """
    loss = result
    output = None
    if isinstance(result, tuple) and len(result) == 2:
        loss, output = result
    if not isinstance(loss, Tensor):
        raise CannotAdopt(
            f"the loss function returned a {type(loss).__name__}; return the loss, a tensor of one number, or a "
            "tuple of it and whatever else, such as (loss, {'scores': scores})"
        )
    if loss.numel() != 1:
        raise CannotAdopt(
            f"the loss has the shape {tuple(loss.shape)}; return one number, such as its .mean()"
        )
    # backward takes any tensor of one number.
    return (loss.reshape(()) if loss.dim() else loss), output


def optimized_parameters(optimizers: Sequence[Optimizer]) -> list[Any]:
    """Returns the parameters of all optimizers."""
    parameters: list[Any] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters += group["params"]
    return parameters


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of a model's first parameter; the CPU if it has none."""
    for parameter in model.parameters():
        return parameter.device
    return torch.device("cpu")
