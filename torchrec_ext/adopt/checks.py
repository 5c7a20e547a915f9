"""What of a user's model, optimizers and loss a captured step takes over exactly; the rest is refused by name.

check_model(), update_rules(): what is known before the first step.

ForwardObserver: what one eager forward shows: tables that are read as matrices, tensors from outside of the model.

step_difference(): whether a captured step did what the eager one does on the same batch.

PythonState: the Python values that a forward reads. A captured step has fixed them, so they are looked at before each.
"""

from __future__ import annotations

import inspect
import linecache
import os
import random
import re
import sysconfig
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import getitem, is_
from pathlib import Path
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.distributed.optim.config import Choice
from torchrec_ext.train.step.memory import StepMemory, UpdatedParameter

_TORCH, _PACKAGE = (str(path) + os.sep for path in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_OTHERS = (_TORCH, str(Path(str(np.__file__)).parent) + os.sep, sysconfig.get_paths()["stdlib"] + os.sep, "<frozen")
_SITE = sysconfig.get_paths()["purelib"] + os.sep
SCALARS = (bool, int, float, str, bytes, type(None))
_MOST = 4096  # Python objects that are looked into
_SMALL = 64  # elements of a list or dict that are looked at


def is_users_file(file: str) -> bool:
    """Whether a file is neither torch's nor this package's."""
    return not file.startswith((_PACKAGE, _TORCH, "<"))


def user_line() -> str:
    """Returns file, line and text of the innermost call that is neither torch's nor this package's."""
    frame = inspect.currentframe()
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "an unknown line"
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{line} ({linecache.getline(file, line).strip()})"


def module_line(model: nn.Module, path: str) -> str:
    """Names a submodule or parameter by its path, with the line of the user's class that sets it, where known."""
    parent, _, name = path.rpartition(".")
    while parent and type(model.get_submodule(parent)).__module__.startswith("torch."):
        parent, _, name = parent.rpartition(".")
    try:
        kind = type(model.get_submodule(parent))
        lines, first = inspect.getsourcelines(kind)
        file = inspect.getsourcefile(kind)
    except (OSError, TypeError):
        return f"'{path}'"
    if kind.__module__.startswith("torch."):
        return f"'{path}'"
    offset = next((index for index, line in enumerate(lines) if re.search(rf"self\.{re.escape(name)}\b", line)), 0)
    return f"'{path}' ({file}:{first + offset})"


_WRAPPERS = {
    "DistributedDataParallel": "adopt its .module, and average ranks every few steps (local SGD) in place of DDP",
    "FullyShardedDataParallel": "adopt the module inside it, on one rank",
    "DataParallel": "adopt its .module",
    "OptimizedModule": "adopt the module that you gave to torch.compile: the step is compiled as a whole",
    "RecursiveScriptModule": "adopt the module that you gave to torch.jit.script",
}
_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


def check_model(model: nn.Module) -> None:
    """Checks what of a model is known before a step.

    Raises:
        CannotAdopt: a module or parameter does what a captured step would not; the message names it.
    """
    # A line is looked for where there is something to say: Python parses the file of the class for it.
    for path, module in model.named_modules():
        if fault := _fault_of_module(module):
            raise CannotAdopt(f"{module_line(model, path)} {fault}")
    if any(vars(torch.nn.modules.module)[f"_global{attribute}"] for attribute in _HOOKS):
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
        if any(not getattr(each, "of_adopt", False) for each in getattr(module, attribute).values()):
            return (
                f"has a {hook}, whose Python a captured step would not run; remove it, or write what it computes into "
                "forward (weight_norm and spectral_norm: take those of torch.nn.utils.parametrizations)"
            )
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
    if parameter.dtype != torch.float32:
        return (
            f"is {parameter.dtype}; weights are trained in torch.float32: call model.float(), and give "
            "autocast=lambda: torch.autocast('cpu', torch.bfloat16) to compute in 16 bits"
        )
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        return (
            "has a hook on its gradient, whose Python a captured step would not run; remove it, and write what it does "
            "into the loss, or limit the norm by clip_norm="
        )
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


def update_rules(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, tuple[int, int, nn.Parameter, Choice]]:
    """Returns for each parameter that an optimizer moves, by name: optimizer, group, the parameter and its rule.

    Raises:
        CannotAdopt: an optimizer or a setting has no captured form, or a parameter is not the model's.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rules: dict[str, tuple[int, int, nn.Parameter, Choice]] = {}
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
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise CannotAdopt(f"{name} has a step hook, whose Python a captured step would not run; remove it")
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise CannotAdopt(f"{name}.step was replaced by another function, which a captured step would not run")
    return kind


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
    )


def fixed_settings(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[Any]]:
    """Returns the settings of all groups that a captured step has fixed, which is all but the learning rate."""
    return [
        [len(group["params"]), *[group.get(setting) for setting in _FIXED]]
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


class ForwardObserver(TorchFunctionMode):
    """Looks at the torch calls of one forward.

    Args:
        model: the user's model.
        batch: tensors that the loss is called with.
        tables: names of the weights that look-ups read, by id.

    Attributes:
        calls: number of torch calls.
        outside: tensors that are neither the model's, nor the batch's, nor computed, by id.
        matrices: the tables that are read as matrices, with the line that does.
        inside: whether a look-up is running, which reads its own table.
        problem: what stands in the way of a captured step; empty where nothing was seen.
    """

    def __init__(self, model: nn.Module, batch: Sequence[Tensor], tables: Mapping[int, str]) -> None:
        super().__init__()
        self.calls, self.inside, self.problem = 0, False, ""
        self.outside: dict[int, Tensor] = {}
        self.matrices: dict[str, str] = {}
        self._tables = tables
        # Kept, so that no later tensor gets the id of an earlier one.
        self._known = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *batch)}

    def know(self, tensors: Sequence[Tensor]) -> None:
        """Takes tensors for those of the batch."""
        self._known.update((id(tensor), tensor) for tensor in tensors)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes the tensors of one call."""
        self.calls += 1
        for tensor in tensor_leaves((args, kwargs)):
            if id(tensor) in self._tables and not self.inside:
                self.matrices.setdefault(self._tables[id(tensor)], user_line())
            if id(tensor) not in self._known:
                if tensor.requires_grad and not self.problem:
                    self.problem = (
                        f"{user_line()} reads a tensor of shape {tuple(tensor.shape)} that requires a gradient and "
                        "is not the model's; put all modules of the loss into one: "
                        "adopt(nn.ModuleList([model, other]), ...)"
                    )
                self.outside[id(tensor)] = self._known[id(tensor)] = tensor
        result = func(*args, **(kwargs or {}))
        self._known.update((id(tensor), tensor) for tensor in tensor_leaves(result))
        return result


def loss_and_output(result: Any) -> tuple[Tensor, Any]:
    """Returns the loss, (), and the output of what a user's loss function returned.

    Raises:
        CannotAdopt: it is neither a loss nor a tuple of a loss and something else.
    """
    loss, output = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(loss, Tensor):
        raise CannotAdopt(
            f"the loss function returned a {type(result).__name__}; return the loss, a tensor of one number, or a "
            "tuple of it and whatever else, such as (loss, {'scores': scores})"
        )
    if loss.dim():
        raise CannotAdopt(f"the loss has the shape {tuple(loss.shape)}; return one number, such as its .mean()")
    return loss, output


def tensor_leaves(tree: Any) -> Iterator[Tensor]:
    """Yields the tensors of a tree of tuples, lists and dicts."""
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


_INTERNAL = set(vars(nn.Module())) - {"training"}


class PythonState:
    """The Python values that a loss function and a model's forward can read: attributes, globals, closures.

    Args:
        model: the user's model.
        loss: the user's function from a batch to the loss.

    Attributes:
        scaler: label of a GradScaler that was seen; empty where none was.
    """

    def __init__(self, model: nn.Module, loss: Any) -> None:
        self.scaler = ""
        self._seen: dict[int, Any] = {}
        self._names: set[str] = set()
        self._objects: list[tuple[str, Any]] = []
        self._entries: list[tuple[Any, Any, str]] = []
        self._classes: set[type] = set()
        self._visit(model, "model")
        self._visit(loss, "loss")
        self._visit_methods()
        for label, value in self._objects:
            self._attributes(label, value)
        for base in {base for kind in self._classes for base in kind.__mro__}:
            for key, held in vars(base).items():
                if key in self._names and isinstance(held, SCALARS):
                    self._entries.append((vars(base), key, f"'{base.__name__}.{key}'"))
        self._holders, self._keys = [holder for holder, _, _ in self._entries], [key for _, key, _ in self._entries]
        self._values = list(map(getitem, self._holders, self._keys))
        self._token = tuple(map(_identity, self._values))

    def token(self) -> tuple[Any, ...]:
        """Returns a value that changes when one of the Python values does; fast where none has."""
        try:
            if not all(map(is_, map(getitem, self._holders, self._keys), self._values)):
                self._values = list(map(getitem, self._holders, self._keys))
                self._token = tuple(map(_identity, self._values))
        except (LookupError, ValueError):  # an attribute or element was deleted
            return ("deleted",)
        return self._token

    def changed(self, before: tuple[Any, ...]) -> str:
        """Names the first value that is not as in an earlier :meth:`token`; empty where there is none."""
        now = self.token()
        pairs = zip(before, now, self._entries, strict=False)
        return next((label for old, new, (_, _, label) in pairs if old != new), "" if len(before) == len(now) else "?")

    def snapshot(self) -> list[Any]:
        """Returns the values, the elements of lists and dicts among them, and the states of Python's random numbers."""
        drawn = random.getstate(), [str(value) for value in np.random.get_state()]
        return [*[_elements(holder[key]) for holder, key, _ in self._entries], drawn]

    def difference(self, before: list[Any]) -> str:
        """Names the first value that is not as in an earlier :meth:`snapshot`; empty where there is none."""
        labels = [*[label for _, _, label in self._entries], "the state of Python's or numpy's random numbers"]
        pairs = zip(before, self.snapshot(), labels, strict=True)
        return next((label for old, new, label in pairs if not _same(old, new)), "")

    def _visit(self, value: Any, label: str) -> None:
        if id(value) in self._seen or len(self._seen) > _MOST or isinstance(value, SCALARS):
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self._visit_module(value, label)
        elif isinstance(value, FunctionType):
            self._visit_function(value)
        elif isinstance(value, MethodType):
            self._visit(value.__func__, label)
            self._visit(value.__self__, label)
        elif isinstance(value, partial):
            for inner in (value.func, list(value.args), dict(value.keywords)):
                self._visit(inner, label)
        elif isinstance(value, list | tuple | dict) and len(value) <= _SMALL:
            for key in list(value) if isinstance(value, dict) else range(len(value)):
                self._entry(value, key, f"{label}[{key!r}]")
        elif isinstance(value, torch.amp.GradScaler):
            self.scaler = label
        elif _is_plain(value):
            self._objects.append((label, value))
            self._classes.add(type(value))

    def _visit_module(self, module: nn.Module, label: str) -> None:
        self._objects.append((label, module))
        self._classes.add(type(module))
        for name, child in module._modules.items():
            if child is not None:
                self._visit(child, f"{label}.{name}")

    def _visit_methods(self) -> None:
        """Visits forward, and the methods, properties and attributes that a function reads which was visited."""
        visited = -1
        while visited < len(self._seen):
            visited = len(self._seen)
            functions = [pair for kind in list(self._classes) for base in kind.__mro__ for pair in vars(base).items()]
            for name, function in functions:
                inner = getattr(function, "__func__", getattr(function, "fget", function))
                if isinstance(inner, FunctionType) and (name in ("forward", "__call__") or name in self._names):
                    self._visit(inner, name)
            for label, value in list(self._objects):
                for name, held in list(vars(value).items()):
                    if name in self._names:
                        self._visit(held, f"{label}.{name}")

    def _visit_function(self, function: FunctionType) -> None:
        if not _is_users(function.__code__.co_filename):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                self._entry(_Cell(cell), name, f"'{name}' around {function.__qualname__}")
        for index in range(len(function.__defaults__ or ())):
            self._entry(function.__defaults__, index, f"default {index} of {function.__qualname__}")
        for name in function.__kwdefaults__ or {}:
            self._entry(function.__kwdefaults__, name, f"the default of '{name}' in {function.__qualname__}")
        names = set(_names(function.__code__))
        self._names |= names
        for name in sorted(names & set(function.__globals__)):
            self._entry(function.__globals__, name, f"the global '{name}'")

    def _entry(self, holder: Any, key: Any, label: str) -> None:
        try:
            value = holder[key]
        except (LookupError, ValueError):  # not set yet
            return
        self._entries.append((holder, key, label))
        self._visit(value, label)

    def _attributes(self, label: str, value: Any) -> None:
        # Of torch's modules the numbers alone: an RNN keeps lists of its weights, and makes them anew.
        torchs = type(value).__module__.startswith(("torch.", "torchrec_ext."))
        self._entries.append((_Size(vars(value)), label, f"the attributes of '{label}'"))
        for key, held in list(vars(value).items()):
            read = isinstance(held, SCALARS) if torchs else key in self._names or key == "training"
            if read and key not in _INTERNAL and key != "forward":
                self._entries.append((vars(value), key, f"'{label}.{key}'"))
        if isinstance(value, nn.Module):
            for kind in ("_buffers", "_parameters", "_modules"):
                self._entries += [(vars(value)[kind], key, f"'{label}.{key}'") for key in vars(value)[kind]]


class _Size:
    """The number of values that a dict has, by any key."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getitem__(self, key: Any) -> int:
        return len(self._values)


class _Cell:
    """The value of a closure, by any key."""

    def __init__(self, cell: Any) -> None:
        self._cell = cell

    def __getitem__(self, key: Any) -> Any:
        return self._cell.cell_contents


def _is_users(file: str) -> bool:
    torchs_or_ours = file.startswith((*_OTHERS[:2], _PACKAGE))
    return not torchs_or_ours and (file.startswith(_SITE) or not file.startswith(_OTHERS))


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, type | Tensor | torch.optim.Optimizer) or not hasattr(value, "__dict__"):
        return False
    return kind in (SimpleNamespace, Namespace) or not kind.__module__.startswith(("torch", "numpy", "builtins"))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _identity(value: Any) -> Any:
    return value if isinstance(value, SCALARS) else id(value)


def _elements(value: Any) -> Any:
    if isinstance(value, dict):
        return [value, *value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "deque":
        return [value, *value]
    return [value]


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, tuple):
        return bool(before == after)
    return len(before) == len(after) and all(
        old is new or (isinstance(old, SCALARS) and type(old) is type(new) and old == new)
        for old, new in zip(before, after, strict=True)
    )


def _memory_tensors(memory: StepMemory) -> dict[str, Tensor]:
    """Returns weights, state, counts of steps and fixed tensors by name."""
    result = dict(memory.fixed)
    for moved in memory.moved:
        result[moved.name] = moved.weight
        result |= {f"{moved.name}/{index}": tensor for index, tensor in enumerate(moved.state)}
        result |= {f"{moved.name}/step {index}": tensor for index, tensor in enumerate(moved.steps)}
    return result


def contents(memory: StepMemory) -> dict[str, Tensor]:
    """Returns copies of weights, state, counts of steps and fixed tensors by name."""
    return {name: tensor.clone() for name, tensor in _memory_tensors(memory).items()}


@torch.no_grad()
def write_back(memory: StepMemory, before: Mapping[str, Tensor]) -> None:
    """Writes what :func:`contents` returned before."""
    for name, tensor in _memory_tensors(memory).items():
        tensor.copy_(before[name])


_NEAR, _FLOOR = 1e-4, 1e-5  # of a tensor's greatest gradient, and of the model's greatest: rounding is below
_ROUNDING = 2.0**-22  # of a float32 weight that is moved


def step_difference(
    memory: StepMemory, before: Mapping[str, Tensor], captured: Mapping[str, Tensor], *results: Any
) -> str:
    """Names what differs by more than rounding between a captured and an eager step, whose tensors are in the memory.

    A gradient that is nothing but rounding, as of a bias before batch normalisation, is a step of Adam's full size in
    any direction: weights are compared where their gradient counts.
    """
    (loss, output), (eager_loss, eager_output), factor = results
    near, floor = _NEAR * factor, _FLOOR * factor
    if abs(float(loss - eager_loss)) > near * max(abs(float(eager_loss)), 1e-3):
        return f"the loss, {float(loss):.7g}, not {float(eager_loss):.7g}"
    eager = _memory_tensors(memory)
    pulls = {moved.name: _pull(moved, before, eager) for moved in memory.moved}
    greatest = max((float(pull.abs().max()) for pull in pulls.values() if pull.numel()), default=0.0)
    for moved in memory.moved:
        pull, other = pulls[moved.name], _pull(moved, before, captured)
        if not pull.numel():
            continue
        # Without state it is seen by how far the weight moves, which is rounded as the weight is.
        rounding = 0.0 if moved.state else _ROUNDING * float(eager[moved.name].abs().max())
        if float((pull - other).abs().max()) > near * float(pull.abs().max()) + floor * greatest + rounding:
            return f"the gradient of '{moved.name}'"
        counts = pull.abs() > 100 * floor * greatest
        step = (eager[moved.name] - before[moved.name]).abs().max()
        off = ((eager[moved.name] - captured[moved.name]).abs() * counts).max()
        if float(off) > 0.05 * float(step) + 1e-6 * float(eager[moved.name].abs().max()):
            return f"the weights of '{moved.name}'"
    for name, tensor in memory.fixed.items():
        if not torch.allclose(tensor.float(), captured[name].float(), rtol=10 * near, atol=near):
            return f"the buffer '{name}'"
    outputs, eager_outputs = list(tensor_leaves(output)), list(tensor_leaves(eager_output))
    if len(outputs) != len(eager_outputs):
        return f"{len(outputs)} outputs beside the loss, not {len(eager_outputs)}"
    for tensor, other in zip(outputs, eager_outputs, strict=True):
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            return f"an output of {tuple(tensor.shape)} {tensor.dtype}, not {tuple(other.shape)} {other.dtype}"
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        scale = max(float(other.float().abs().max()), 1e-3)
        if float((tensor - other).abs().max()) > 10 * near * scale:
            return "the output beside the loss"
    return ""


def _pull(moved: UpdatedParameter, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Tensor:
    """Returns what stands for the gradient that a step has had: how far it has moved the first state, or the weight."""
    name = f"{moved.name}/0" if moved.state else moved.name
    far = after[name] - before[name]
    return far.sqrt() if moved.choice.kind == "adagrad" else far
