"""Checks that a user's model, optimizers and step can be captured exactly, and names what cannot.

check_model(), update_rules(): what is known before the first step.

ForwardWatch: what one eager forward does that no graph shows.

step_difference(): whether a captured step did what the eager one does on the same batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.capture.memory import StepMemory, UpdatedParameter
from torchrec_ext.distributed.optim.config import Choice
from torchrec_ext.observe.state_copy import random_state
from torchrec_ext.observe.user_lines import module_line

_WRAPPERS = {
    "DistributedDataParallel": "adopt its .module, and average ranks every few steps (local SGD) in place of DDP",
    "FullyShardedDataParallel": "adopt the module inside it, on one rank",
    "DataParallel": "adopt its .module",
    "OptimizedModule": "adopt the module that you gave to torch.compile: the step is compiled as a whole",
    "RecursiveScriptModule": "adopt the module that you gave to torch.jit.script",
}
_HOOKS = {"_backward_hooks": "backward hook", "_backward_pre_hooks": "backward pre-hook"}
# Hooks on all modules, which no graph of Dynamo's has and no guard sees.
GLOBAL_HOOKS = [
    hooks
    for name, hooks in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and name.endswith("hooks") and isinstance(hooks, dict)
]
HOOK_ON_GRADIENT = (
    "has a hook on its gradient, whose Python a captured step would not run; remove it, and write what it does into "
    "the loss, or limit the norm by clip_norm="
)


def check_model(model: nn.Module) -> None:
    """Checks what of a model is known before a step.

    Raises:
        CannotAdopt: a module or parameter does what a captured step would not; the message names it.
    """
    # A line is looked for where there is something to say: Python parses the file of the class for it.
    for path, module in model.named_modules():
        if fault := _fault_of_module(module):
            raise CannotAdopt(f"{module_line(model, path)} {fault}")
    if any(GLOBAL_HOOKS):
        raise CannotAdopt("torch has a hook on all modules, whose Python a captured step would not run; remove it")
    for path, parameter in model.named_parameters():
        if fault := _fault_of_parameter(parameter):
            raise CannotAdopt(f"{module_line(model, path)} {fault}")
    devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        raise CannotAdopt(f"the model is on {' and '.join(sorted(devices))}; put it on one device")


def _fault_of_module(module: nn.Module) -> str:
    kind = type(module).__name__
    if kind in _WRAPPERS:
        return f"is a {kind}: {_WRAPPERS[kind]}"
    for attribute, hook in _HOOKS.items():
        if getattr(module, attribute):
            return f"has a {hook}, whose Python a captured step would not run; remove it, or write it into forward"
    return _fault_of_table(module) if isinstance(module, nn.Embedding | nn.EmbeddingBag) else ""


def _fault_of_table(module: nn.Embedding | nn.EmbeddingBag) -> str:
    if module.max_norm is not None:
        return (
            f"has max_norm={module.max_norm:g}, so that forward rewrites rows; leave it out and limit the norm of the "
            "vectors that are read, F.normalize(rows) for one"
        )
    if module.scale_grad_by_freq:
        return "has scale_grad_by_freq=True, which divides a row's gradient by its look-ups; leave it out"
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        return "has mode='max'; take 'sum' or 'mean', or nn.Embedding and .amax(1)"
    return ""


def _fault_of_parameter(parameter: nn.Parameter) -> str:
    if type(parameter) not in (nn.Parameter, Tensor):
        return f"is a {type(parameter).__name__}, not a plain parameter; run one forward first if it is lazy"
    if parameter.dtype != torch.float32 and parameter.requires_grad:
        return (
            f"is {parameter.dtype}; weights are trained in torch.float32: call model.float(), and give "
            "autocast=lambda: torch.autocast('cpu', torch.bfloat16) to compute in 16 bits"
        )
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        return HOOK_ON_GRADIENT
    return ""


_KINDS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adam",
    torch.optim.Adagrad: "adagrad",
    torch.optim.SGD: "sgd",
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
_FIXED = ("betas", "eps", "weight_decay", "decoupled_weight_decay", *_REFUSED)


# Of each parameter that an optimizer moves, by name: optimizer, group, the parameter and its rule.
Rules = dict[str, tuple[int, int, nn.Parameter, Choice]]


def update_rules(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Rules:
    """Returns for each parameter that an optimizer moves, by name: optimizer, group, the parameter and its rule.

    Raises:
        CannotAdopt: an optimizer or a setting has no captured form, or a parameter is not the model's.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rules: Rules = {}
    for number, optimizer in enumerate(optimizers):
        kind = _kind(optimizer)
        for index, group in enumerate(optimizer.param_groups):
            _check_settings(type(optimizer).__name__, group)
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    raise CannotAdopt(
                        f"group {index} of {type(optimizer).__name__} has a parameter of shape "
                        f"{tuple(parameter.shape)} that is not the model's; put all modules of the loss into one: "
                        "adopt(nn.ModuleList([model, other]), ...)"
                    )
                if name in rules:
                    raise CannotAdopt(f"{module_line(model, name)} is moved by two optimizers; give it to one")
                rules[name] = number, index, parameter, _choice(kind, group)
    return rules


def _kind(optimizer: torch.optim.Optimizer) -> str:
    name, kind = type(optimizer).__name__, _KINDS.get(type(optimizer))
    if kind is None:
        instead = (
            "torch.optim.Adam moves rows that few steps read as cheaply once captured"
            if name == "SparseAdam"
            else f"those with one: {', '.join(known.__name__ for known in _KINDS)}"
        )
        raise CannotAdopt(f"the optimizer {name} has no captured form; {instead}")
    if hook := hook_of_optimizers([optimizer]):
        raise CannotAdopt(f"{hook}, whose Python a captured step would not run; remove it")
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise CannotAdopt(f"{name}.step was replaced by another function, which a captured step would not run")
    return kind


_OPTIMIZERS = sys.modules[torch.optim.Optimizer.__module__]


def hook_of_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Names a hook on steps of optimizers; empty if there is none."""
    for optimizer in optimizers:
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return f"{type(optimizer).__name__} has a step hook"
    if vars(_OPTIMIZERS)["_global_optimizer_pre_hooks"] or vars(_OPTIMIZERS)["_global_optimizer_post_hooks"]:
        return "torch.optim has a hook on all optimizers"
    return ""


def _check_settings(optimizer: str, group: Mapping[str, Any]) -> None:
    for setting, remedy in _REFUSED.items():
        if group.get(setting):
            raise CannotAdopt(f"{optimizer} with {setting}={group[setting]} has no captured form; {remedy}")
    for setting in ("lr", "betas", "eps", "weight_decay"):
        if any(isinstance(value, Tensor) for value in pytree.tree_leaves(group.get(setting))):
            raise CannotAdopt(f"{optimizer} has a tensor for {setting}; give a float, which schedulers change as well")
    if group["params"] and group["params"][0].is_cuda and (group.get("fused") or group.get("capturable")):
        raise CannotAdopt(f"{optimizer} is fused or capturable; leave both out: the whole step is captured")


def _choice(kind: str, group: Mapping[str, Any]) -> Choice:
    decay, decoupled = float(group.get("weight_decay", 0.0)), bool(group.get("decoupled_weight_decay"))
    return Choice(
        kind=kind,
        lr=float(group["lr"]),
        eps=float(group.get("eps", 0.0)),
        betas=tuple(group.get("betas", (0.0, 0.0))),
        weight_decay=decay if decoupled else 0.0,
        l2=0.0 if decoupled else decay,
        decays_all_rows=decoupled,
    )


def fixed_settings(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[Any]]:
    """Returns the settings of all groups that a captured step has fixed, which is all but the learning rate."""
    return [
        [len(group["params"]), *[group.get(setting) for setting in _FIXED]]
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


class ForwardWatch(TorchFunctionMode):
    """Surrounds the forward of one eager step, and notes what no graph shows.

    Args:
        model: the user's model.
        args: the batch.

    Attributes:
        args: the batch.
        calls: number of torch calls.
        random: whether the forward draws random numbers.
        selects: whether the forward calls masked_select.
        problem: what stands in the way of a captured step; empty if nothing was seen.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        super().__init__()
        self.args, self.calls, self.random, self.selects, self.problem = args, 0, False, False, ""
        self._parameters = list(model.parameters())
        self._written = [*self._parameters, *tensor_leaves(args)]
        self._device = self._parameters[0].device

    def __enter__(self) -> ForwardWatch:
        self._drawn, self._grads = random_state(self._device), [parameter.grad for parameter in self._parameters]
        self._versions = [tensor._version for tensor in self._written]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        super().__exit__(kind, *error)  # type: ignore[no-untyped-call]
        self.random = not torch.equal(self._drawn, random_state(self._device))
        pairs = zip(self._parameters, self._grads, strict=True)
        if any(parameter.grad is not grad for parameter, grad in pairs):
            self.problem = "the loss function calls backward(); return the loss, and leave it to the step"
        elif [tensor._version for tensor in self._written] != self._versions:
            self.problem = (
                "the loss function writes into a weight or into the batch; leave steps to the optimizer, and write "
                "into a copy"
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts one call."""
        self.calls += 1
        name = getattr(func, "__name__", "")
        self.selects |= name == "masked_select"
        if name == "backward" or func is torch.autograd.backward:
            self.problem = "the loss function calls backward(); return the loss, and leave it to the step"
        return func(*args, **(kwargs or {}))


def loss_and_output(result: Any) -> tuple[Tensor, Any]:
    """Returns the loss, (), and the output of what a user's loss function returned, whose loss may be (1,) or (1, 1).

    Raises:
        CannotAdopt: it is neither a loss nor a tuple of a loss and something else.
    """
    loss, output = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(loss, Tensor):
        raise CannotAdopt(
            f"the loss function returned a {type(loss).__name__}; return the loss, a tensor of one number, or a "
            "tuple of it and whatever else, such as (loss, {'scores': scores})"
        )
    if loss.numel() != 1:
        raise CannotAdopt(f"the loss has the shape {tuple(loss.shape)}; return one number, such as its .mean()")
    return (loss.reshape(()) if loss.dim() else loss), output  # backward takes any tensor of one number


def tensor_leaves(tree: Any) -> Iterator[Tensor]:
    """Yields the tensors of a tree of tuples, lists and dicts."""
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def _held(memory: StepMemory, outer: Sequence[Tensor]) -> dict[str, Tensor]:
    """Returns all that a step may write by name."""
    result = {name: tensor for name, tensor in memory.tensors().items() if not name.startswith("rate ")}
    result |= {f"outer {index}": tensor for index, tensor in enumerate(outer)}
    for moved in memory.moved:
        result |= {f"{moved.name}/step {index}": tensor for index, tensor in enumerate(moved.steps)}
    return result


def contents(memory: StepMemory, outer: Sequence[Tensor]) -> dict[str, Tensor]:
    """Returns copies of all that a step may write, by name.

    Args:
        memory: the step's memory.
        outer: tensors that the step reads and that are neither the batch's nor in the memory, such as buffers.
    """
    return {name: tensor.clone() for name, tensor in _held(memory, outer).items()}


@torch.no_grad()
def write_back(memory: StepMemory, outer: Sequence[Tensor], before: Mapping[str, Tensor]) -> None:
    """Writes what :func:`contents` returned before."""
    for name, tensor in _held(memory, outer).items():
        tensor.copy_(before[name])


_NEAR, _FLOOR = 1e-4, 1e-5  # of a tensor's greatest gradient, and of the model's greatest: rounding is below
_ROUNDING = 2.0**-22  # of a float32 weight that is moved


def step_difference(
    memory: StepMemory,
    outer: Sequence[Tensor],
    before: Mapping[str, Tensor],
    captured: Mapping[str, Tensor],
    *results: Any,
    noise: Mapping[str, float] = MappingProxyType({}),
) -> str:
    """Names what differs by more than rounding between a captured and an eager step, whose tensors are in the memory.

    ``noise`` says how far rounding of the weights moves the gradient of a parameter, and of ``loss`` the loss: within
    ten times that they do not differ.

    A gradient that is nothing but rounding, as of a bias before batch normalisation, is a step of Adam's full size in
    any direction: weights are compared where their gradient counts.
    """
    (loss, output), (eager_loss, eager_output), factor = results
    near, floor = _NEAR * factor, _FLOOR * factor
    most = near * max(abs(float(eager_loss)), 1e-3) + 10 * noise.get("loss", 0.0)
    if abs(float(loss - eager_loss)) > most:
        return f"the loss, {float(loss):.7g}, not {float(eager_loss):.7g}"
    eager = _held(memory, outer)
    pulls = {moved.name: _pull(moved, before, eager) for moved in memory.moved}
    greatest = max((float(pull.abs().max()) for pull in pulls.values() if pull.numel()), default=0.0)
    for moved in memory.moved:
        pull, other = pulls[moved.name], _pull(moved, before, captured)
        if not pull.numel():
            continue
        # Without state it is seen by how far the weight moves, which is rounded as the weight is.
        rounding = 0.0 if moved.state else _ROUNDING * float(eager[moved.name].abs().max())
        rounding += 10 * noise.get(moved.name, 0.0)
        if float((pull - other).abs().max()) > near * float(pull.abs().max()) + floor * greatest + rounding:
            return f"the gradient of '{moved.name}'"
        counts = pull.abs() > 100 * max(floor * greatest, noise.get(moved.name, 0.0))
        step = (eager[moved.name] - before[moved.name]).abs().max()
        # A gradient that is rounding makes a step of full size in any direction, and no longer one.
        share = torch.where(counts, 0.05, 2.5)
        off = ((eager[moved.name] - captured[moved.name]).abs() / share).max()
        if float(off) > float(step) + 2e-5 * float(eager[moved.name].abs().max()):
            return f"the weights of '{moved.name}'"
    for name in eager:
        if name.startswith("outer ") and not torch.allclose(
            eager[name].float(), captured[name].float(), rtol=10 * near, atol=near, equal_nan=True
        ):
            return f"a buffer of shape {tuple(eager[name].shape)}"
    kept = [other for other in output if isinstance(other, Tensor)]
    for tensor in tensor_leaves(eager_output):
        if not any(_alike(tensor, other, 10 * near) for other in kept):
            return f"an output of {tuple(tensor.shape)} {tensor.dtype} beside the loss"
    return ""


def _alike(tensor: Tensor, other: Tensor, near: float) -> bool:
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    scale = max(float(tensor.float().abs().max()), 1e-3)
    return not float((tensor - other).abs().max()) > near * scale


@torch.no_grad()
def response_to_rounding(
    memory: StepMemory, outer: Sequence[Tensor], before: Mapping[str, Tensor], step: Callable[[], Tensor]
) -> dict[str, float]:
    """Returns how far a step's gradients move if weights change by rounding, by parameter, and of ``loss`` the loss.

    Args:
        memory: the step's memory.
        outer: see :func:`contents`.
        before: what the memory held before the step.
        step: makes the step on the memory, and returns its loss.
    """
    now, draw = contents(memory, outer), torch.Generator(memory.device).manual_seed(0)
    losses, made = [], []
    try:
        for shifted in (False, True):
            write_back(memory, outer, before)
            begun = dict(before)
            for moved in memory.moved if shifted else ():
                shift = torch.randint(-1, 2, moved.weight.shape, generator=draw, device=memory.device)
                moved.weight.mul_(1 + 2.0**-23 * shift)
                begun[moved.name] = moved.weight.clone()
            losses.append(float(step()))
            memory.settle()
            after = _held(memory, outer)
            made.append({moved.name: _pull(moved, begun, after).clone() for moved in memory.moved})
    finally:
        memory.settle()
        write_back(memory, outer, now)
    first, second = made
    noise = {name: float((pull - second[name]).abs().max()) for name, pull in first.items() if pull.numel()}
    return {"loss": abs(losses[1] - losses[0]), **noise}


def _pull(moved: UpdatedParameter, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Tensor:
    """Returns what stands for the gradient that a step has had: how far it has moved the first state, or the weight."""
    name = f"{moved.name}/0" if moved.state else moved.name
    far = after[name] - before[name]
    return far.sqrt() if moved.choice.kind == "adagrad" else far
