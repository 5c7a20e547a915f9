"""Stack: K networks of one shape as one module, whose layers are batched by torch.func.vmap.

Axis letters: K members, B rows of a batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.optim import Optimizer

Loss = Callable[..., Tensor]

_PLAIN = (bool, int, float, str, tuple, type(None))
# vmap would copy the tables of all members for each look-up.
_TABLES = (nn.Embedding, nn.EmbeddingBag)
# What they write while they run would be lost in the copy that vmap works on.
_WRITE_BUFFERS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


class Stack(nn.Module):
    """K networks of one shape as one module, which gives the loss of each; train it in your own loop, or by ``adopt``.

    The networks stay the owners of their weights: their ``state_dict()`` is always that of a network trained alone.
    Layers of all members are one batched operation. Tables stay apart: each member's rows are read from its own, with
    the ids of one batch, which all members share. Dropout drops other units in each member.

    Args:
        networks: K networks with the same layers; they may differ in weights.
        loss: function of a network and a batch, which returns the loss, (), as a network alone has it.

    Attributes:
        members: the networks.

    Raises:
        ValueError: the networks differ, share a weight, or have a module whose running statistics would be lost.

    Example:
        >>> networks = [nn.Linear(3, 1) for _ in range(2)]
        >>> stacked = Stack(networks, lambda network, x: network(x).square().mean())
        >>> optimizer = torch.optim.SGD(stacked.groups([0.1, 0.2]))
        >>> stacked(torch.ones(4, 3)).shape
        torch.Size([2])
    """

    def __init__(self, networks: Sequence[nn.Module], loss: Loss) -> None:
        super().__init__()
        _check(networks)
        self.members = nn.ModuleList(networks)
        self._loss = loss
        # Not registered: its weights are those of no member.
        self._base = [_base(networks)]
        tables = {
            f"{path}."
            for path, module in networks[0].named_modules()
            if isinstance(module, _TABLES)
        }
        self._layers = [
            name
            for name, _ in networks[0].named_parameters()
            if not name.startswith(tuple(tables))
        ]
        self._buffers_of = [
            name
            for name, _ in networks[0].named_buffers()
            if not name.startswith(tuple(tables))
        ]
        self._readers = [
            f"{path}.member"
            for path, module in self._base[0].named_modules()
            if isinstance(module, _OwnRows)
        ]

    def forward(self, *batch: Any) -> Tensor:
        """Returns (K,) losses of a batch, one for each member."""
        own = [dict(member.named_parameters()) for member in self.members]
        constants = [dict(member.named_buffers()) for member in self.members]
        values: dict[str, Tensor] = {}
        for name in self._layers:
            values[name] = torch.stack([each[name] for each in own])
        for name in self._buffers_of:
            values[name] = torch.stack([each[name] for each in constants])
        device = next(self.parameters()).device
        number = torch.arange(len(self.members), device=device)
        values |= dict.fromkeys(self._readers, number)
        base = self._base[0]
        if base.training != self.training:
            base.train(self.training)

        def one(values: dict[str, Tensor]) -> Tensor:
            def network(*inputs: Any, **options: Any) -> Any:
                return functional_call(base, values, inputs, options)

            return self._loss(network, *batch)

        return vmap(one, randomness="different")(values)

    def groups(self, rates: Sequence[float]) -> list[dict[str, Any]]:
        """Returns a group of parameters for each member, with a learning rate of its own, for a torch optimizer.

        Args:
            rates: (K,) learning rates.

        Raises:
            ValueError: there are not K rates.
        """
        if len(rates) != len(self.members):
            raise ValueError(
                f"{len(rates)} rates for {len(self.members)} members: give one for each"
            )
        pairs = zip(self.members, rates, strict=True)
        return [{"params": list(member.parameters()), "lr": lr} for member, lr in pairs]

    def stop(self, optimizer: Optimizer, member: int) -> None:
        """Ends the training of one member: its weights stay as they are, bit by bit, and the others go on.

        Its rate becomes 0, so that nothing is compiled anew. A schedule must leave it there.

        Args:
            optimizer: optimizer of :meth:`groups`.
            member: number of the member.

        Raises:
            ValueError: the optimizer has no group of this member alone.
        """
        own = {id(parameter) for parameter in self.members[member].parameters()}
        found = False
        for group in optimizer.param_groups:
            of_group = {id(parameter) for parameter in group["params"]}
            if of_group <= own:
                group["lr"] = 0.0
                found = True
            elif of_group & own:
                raise ValueError(
                    f"member {member} shares a group with others: make the optimizer of groups(rates)"
                )
        if not found:
            raise ValueError(
                f"the optimizer has no group of member {member}: make it of groups(rates)"
            )


class _OwnRows(nn.Module):
    """Looks up the rows of all members, and keeps those of the member that vmap runs."""

    def __init__(self, tables: Sequence[nn.Module]) -> None:
        super().__init__()
        # Not registered: the tables are the members'.
        self._tables: list[Any] = list(tables)
        self.member: Tensor
        self.register_buffer("member", torch.zeros((), dtype=torch.int64))

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        rows = torch.stack([table(*inputs, **options) for table in self._tables])
        return rows.index_select(0, self.member.reshape(1)).squeeze(0)


def _base(networks: Sequence[nn.Module]) -> nn.Module:
    """Returns a network without weights of its own, whose tables read those of all members."""
    first = networks[0]
    tables = {
        path: module
        for path, module in first.named_modules()
        if isinstance(module, _TABLES)
    }
    # Tables are replaced in the copy, so they are not copied.
    memo: dict[int, Any] = {}
    for path, table in tables.items():
        memo[id(table)] = _OwnRows(
            [network.get_submodule(path) for network in networks]
        )
    for parameter in first.parameters():
        if id(parameter) not in memo:
            memo[id(parameter)] = nn.Parameter(
                torch.empty_like(parameter, device="meta"), parameter.requires_grad
            )
    return copy.deepcopy(first, memo)


def _check(networks: Sequence[nn.Module]) -> None:
    """Refuses networks that are not of one shape.

    Raises:
        ValueError: naming the first difference.
    """
    if len(networks) < 2:
        raise ValueError(f"{len(networks)} networks: a stack has two or more")
    first, *others = networks
    expected = _shapes(first)
    for number, other in enumerate(others, 1):
        found = _shapes(other)
        for name in [*expected, *found]:
            if expected.get(name) != found.get(name):
                here = found.get(name, "not there")
                first_has = expected.get(name, "not there")
                raise ValueError(
                    f"{name} is {here} in network {number}, {first_has} in network 0: a stack needs one shape; "
                    "train others in one ModuleList"
                )
    parameters = [
        parameter for network in networks for parameter in network.parameters()
    ]
    if len(set(map(id, parameters))) < len(parameters):
        raise ValueError(
            "two networks share a weight: that is one network; train them as one module"
        )
    for path, module in first.named_modules():
        if (
            isinstance(module, _WRITE_BUFFERS)
            and module.track_running_stats
            and module.running_mean is not None
        ):
            raise ValueError(
                f"{path} is a {type(module).__name__}, whose running statistics a stack would lose: use LayerNorm, or "
                "track_running_stats=False"
            )
        if isinstance(module, _TABLES) and module.max_norm is not None:
            raise ValueError(
                f"{path} has max_norm={module.max_norm:g}, which rewrites rows in forward: leave it out"
            )


def _shapes(network: nn.Module) -> dict[str, str]:
    """Returns what must be equal in all members, by name: classes, plain attributes, shapes of weights and buffers."""
    found = {}
    for path, module in network.named_modules():
        found[path or "the network"] = type(module).__name__
        for name, value in vars(module).items():
            if not name.startswith("_") and isinstance(value, _PLAIN):
                found[f"{path}.{name}".lstrip(".")] = repr(value)
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        found[name] = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
    return found
