"""TowerSplit: what each rank runs of a user's model, as runs of its loss on an example show it."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_flatten

from torchrec_ext.adopt.checks import optimized_parameters
from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.graph import LossFunction
from torchrec_ext.adopt.towers.subnetworks import (
    UserLoss,
    batch_rows,
    changed_attribute,
    outer_buffers,
    python_attributes,
    subnetworks,
)
from torchrec_ext.distributed.runtime import Runtime, gather_objects

_SAMPLE = 4  # rows of a batch whose values ranks compare in every step


class TowerSplit:
    """Observes the towers' inputs and outputs on an example. No other rank takes part.

    Args:
        model: the user's model; may be left in eval mode.
        optimizers: the user's optimizers.
        function: the user's function from a batch to the loss.
        runtime: this process's rank and device.
        ranks: rank of each tower by the path of its module.
        example: a batch.

    Attributes:
        towers: the towers of all ranks.
        local: the towers of this rank.
        top: parameters outside of the towers that optimizers move.
        loss: the user's loss function, with towers that stand in.
        rows: B, the rows of the example.
        draws_random: whether the loss draws random numbers.
        dtype: dtype of the towers' outputs.

    Raises:
        CannotAdopt: the model cannot be split; the message names what and the remedy.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        function: LossFunction,
        runtime: Runtime,
        ranks: Mapping[str, int],
        example: Sequence[Any],
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        self.runtime = runtime
        self._refuse_kinds()
        self.towers = subnetworks(model, ranks, runtime.world_size)
        self.local = [tower for tower in self.towers if tower.rank == runtime.rank]
        self.loss = UserLoss(function, self.towers)
        inside: set[int] = set()
        for tower in self.towers:
            inside.update(map(id, tower.module.parameters()))
        self.top = [
            each
            for each in optimized_parameters(optimizers)
            if id(each) not in inside and each.requires_grad
        ]
        leaves, self._spec = tree_flatten(tuple(example))
        self.rows = batch_rows(leaves)
        self._kinds = list(map(_kind, leaves))
        # UserLoss.refuse_sums() compares the losses of two rows and two others with
        # that of all four.
        if self.rows < 4:
            raise CannotAdopt(
                f"the example has {self.rows} row(s): give a real batch, of 4 rows or more"
            )
        self.draws_random = self._draws_at_random(example)
        if self.draws_random:
            # Without dropout the gradients can be compared with those of one process;
            # nothing_moves() restores the mode.
            model.eval()
            if self._draws_at_random(example):
                raise CannotAdopt(
                    "the loss draws random numbers in eval mode too, so that it cannot be compared with one process: "
                    "draw them in the loader"
                )
        outputs = self.loss.observe(leaves, self._spec, self.rows)
        self.dtype = outputs[0].dtype
        dtypes = sorted({str(output.dtype) for output in outputs})
        # One message holds the outputs of all towers of a rank.
        if len(dtypes) > 1:
            raise CannotAdopt(
                f"the towers return {' and '.join(dtypes)}, which travel together: return one dtype"
            )
        self.loss.refuse_sums(leaves, self._spec, outputs, self.rows)

    def rows_of(self, leaves: Sequence[Any], spec: Any, step: int) -> int:
        """Returns B of the batch of a step, which must be like the example.

        Raises:
            CannotAdopt: its structure, or the kind of a leaf, is another.
        """
        if spec != self._spec:
            # A long structure prints on several lines.
            text = " ".join(f"{spec}, the example had {self._spec}".split())
            raise CannotAdopt(f"step {step}: the batch has the structure {text}")
        for index, (leaf, kind) in enumerate(zip(leaves, self._kinds, strict=True)):
            if _kind(leaf) != kind:
                raise CannotAdopt(
                    f"step {step}: leaf {index} of the batch is {_kind(leaf)}, but was {kind} in the example; all "
                    "batches must be of one kind"
                )
        return batch_rows(leaves)

    def refuse_different_ranks(self, example: Sequence[Any]) -> None:
        """Refuses ranks with different models, optimizers, towers or examples. Collective."""
        # Names and values of all that ranks must have in common, the most telling
        # difference first.
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        facts = [
            ("towers", str({tower.path: tower.rank for tower in self.towers})),
            ("the number of parameters and buffers", str(len(tensors))),
        ]
        kinds: dict[str, Callable[[Tensor], str]] = {
            "the shape of": lambda value: f"{tuple(value.shape)} {value.dtype}",
            "requires_grad of": lambda value: str(value.requires_grad),
            "the values of": _digest,
        }
        for words, text in kinds.items():
            for name, value in tensors.items():
                facts.append((f"{words} '{name}'", text(value)))
        for optimizer in self.optimizers:
            counts = [len(group["params"]) for group in optimizer.param_groups]
            facts.append(
                ("the optimizer", f"{type(optimizer).__name__} of {counts} parameters")
            )
            for number, group in enumerate(optimizer.param_groups):
                for setting, value in group.items():
                    if setting != "params":
                        facts.append(
                            (f"{setting} of parameter group {number}", str(value))
                        )
        values = fingerprint(tree_flatten(tuple(example))[0])
        facts += [
            ("the example", f"{self.rows} rows, {self._kinds}, values {values!r}"),
            ("the mode", f"training={self.model.training}"),
        ]
        every = gather_objects(facts, self.runtime.world_size)
        for rank, others in enumerate(every):
            for first, other in itertools.zip_longest(
                every[0], others, fillvalue=("", "none")
            ):
                if first != other:
                    raise CannotAdopt(
                        f"ranks 0 and {rank} differ in {first[0] or other[0]}: {first[1]} and {other[1]}; all ranks "
                        "need the same: call torch.manual_seed with one seed before the model is made, or load one "
                        "checkpoint"
                    )

    def _refuse_kinds(self) -> None:
        device = next(
            (parameter.device for parameter in self.model.parameters()),
            self.runtime.device,
        )
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            raise CannotAdopt(
                "the model is a DistributedDataParallel, which sums all gradients: give its model.module"
            )
        if device.type != self.runtime.device.type:
            raise CannotAdopt(
                f"the model is on {device}, but this rank's device is {self.runtime.device}: call "
                "model.to(runtime.device) before the optimizer is made"
            )
        if any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers):
            raise CannotAdopt(
                "the optimizer is LBFGS, which calls the loss several times in a step: take another"
            )

    def _draws_at_random(self, example: Sequence[Any]) -> bool:
        """Runs the loss twice, and returns whether it depends on a seed; refuses what a forward changes."""
        state = python_attributes(self.model)
        buffers = outer_buffers(self.model, self.towers)
        losses = []
        # Two seeds give one loss if nothing is drawn.
        for seed in (0, 1):
            for set_seed in (torch.manual_seed, random.seed, np.random.seed):
                set_seed(seed)
            with torch.no_grad():
                losses.append(float(self.loss(*example)[0]))
        if not all(map(math.isfinite, losses)):
            raise CannotAdopt(
                f"the loss of the example is {losses[0]}: give a batch whose loss is finite"
            )
        changed = changed_attribute(state, python_attributes(self.model))
        if changed is not None:
            raise CannotAdopt(
                f"forward sets the attribute '{changed}', of which ranks would have different values: make it a buffer "
                "of its tower, or keep it outside of the model"
            )
        for name, value in outer_buffers(self.model, self.towers).items():
            if not torch.equal(value, buffers[name]):
                raise CannotAdopt(
                    f"forward changes the buffer '{name}' outside of the towers, by each rank's rows alone: move it "
                    "into a tower"
                )
        return losses[0] != losses[1]


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dim()}-d {leaf.dtype} on {leaf.device.type}"
    return type(leaf).__name__


def fingerprint(leaves: Sequence[Any]) -> float:
    """Returns a number that tells batches apart by a few of their rows, and by their order."""
    total = 0.0
    for index, leaf in enumerate(leaves, 1):
        if isinstance(leaf, Tensor):
            few = leaf.detach()[:: max(1, len(leaf) // _SAMPLE)].reshape(-1).double()
            ramp = torch.arange(1, len(few) + 1, dtype=torch.float64, device=few.device)
            total += index * float(torch.nan_to_num(few, 0.0, 1.0, -1.0) @ ramp)
    return total


def _digest(tensor: Tensor) -> str:
    data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data, digest_size=8).hexdigest()
