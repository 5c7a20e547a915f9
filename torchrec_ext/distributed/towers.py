"""TowersOnRanks: the towers of a model at the same time, each on one rank, their outputs exchanged once each way.

Every rank has the whole batch of B rows and runs its own towers on all of them; the layers above run on each rank's n
of these rows. Rank q, whose towers' outputs are W wide in all, sends rank r the (n, W) numbers for its rows, and gets
their gradient back::

    rank 0   user tower -> (B, D)  --.   .-->  top on rows 0 to B/2    --> its share of the loss
                                      > <
    rank 1   item tower -> (B, D)  --'   '-->  top on rows B/2 to B    --> its share of the loss

In one process a captured step is the answer: it runs sub-networks at the same time in one graph, without a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from torchrec_ext.distributed.runtime import (
    Runtime,
    gather_objects,
    refuse_differences,
)


class TowersOnRanks(nn.Module):
    """Runs each tower on one rank, at the same time, and the layers above them on each rank's share of the rows.

    Losses, gradients and weights are those of one process that runs all towers on the batch, to rounding. A layer that
    looks at other rows, such as batch normalisation, sees this rank's rows in ``top``, and all rows in a tower.

    A rank holds the parameters of its own towers and of ``top``, under the names ``towers.NAME...`` and ``top...``,
    whatever the number of ranks. ``torch.distributed.checkpoint.save(model.state_dict())`` on all ranks therefore makes
    one checkpoint of the whole, which one process can load.

    Args:
        towers: modules by name, in one order on all ranks; each returns (B, D), with a D of its own. A tower that
            another rank runs is not kept here, and may be None.
        top: module called with the list of the towers' outputs, (n, D) each, then ``rows``; it returns the loss over
            these n rows, (), or a tuple that begins with it. The loss must be a plain mean over rows: a sum, a weighted
            mean or a softmax over the batch would be another than that of one process. Rank 0's weights are copied to
            all ranks.
        runtime: rank and device of this process. Tower number i is on rank i % R.

    Raises:
        ValueError: no tower, a rank that lacks its tower, a parameter of two towers, or, on every rank, ranks with
            other names or another order.

    Example:
        >>> class Top(nn.Module):
        ...     def forward(self, outputs, label):
        ...         return nn.functional.mse_loss((outputs[0] * outputs[1]).sum(dim=1), label)
        >>> with Runtime.start("cpu") as runtime:
        ...     towers = {"user": nn.Linear(3, 2), "item": nn.Linear(5, 2)}
        ...     model = TowersOnRanks(towers, Top(), runtime)
        ...     model({"user": (torch.ones(4, 3),), "item": (torch.ones(4, 5),)}, torch.ones(4)).shape
        torch.Size([])
    """

    def __init__(
        self,
        towers: Mapping[str, nn.Module | None],
        top: nn.Module,
        runtime: Runtime,
    ) -> None:
        super().__init__()
        if not towers:
            raise ValueError("towers: give at least one")
        self._names = list(towers)
        _refuse_others(self._names, _fault({**towers, "top": top}, runtime), runtime)
        own = {
            name: tower
            for name in self._names[runtime.rank :: runtime.world_size]
            if (tower := towers[name]) is not None
        }
        self.towers = nn.ModuleDict(own)
        self.top = top
        self._runtime = runtime
        self._outputs: list[_Outputs] = []
        self._size: int | None = None
        # In a list, so that the names of its parameters are not in the state twice.
        self._summed: list[nn.Module] = [top]
        if runtime.world_size > 1 and any(p.requires_grad for p in top.parameters()):
            summed = DistributedDataParallel(top)
            # The ranks' losses are shares of one loss, so their gradients are added.
            # A lambda, because DDP compares a hook's annotations as objects.
            summed.register_comm_hook(None, lambda _, bucket: _added_up(bucket))
            self._summed = [summed]

    def forward(self, inputs: Mapping[str, Sequence[Any]], *rows: Tensor) -> Any:
        """Returns the outcome of ``top``, with the loss of all B rows, equal on every rank.

        Its backward on all ranks makes the gradients of this rank's towers and of ``top``. Anything behind the loss is
        of this rank's rows alone, see :meth:`slice_of`.

        Args:
            inputs: arguments of each tower, by name, for all B rows, alike on every rank.
            rows: (B, ...) tensors for ``top``, such as labels; at least one. Each is cut to this rank's rows.

        Raises:
            ValueError: fewer rows than ranks, a tower that returns another number of rows, no ``rows``, or, on every
                rank in the same call, ranks with another B; at the first call, or one of another B: ranks with other
                values, or a tower without a tuple of arguments.
        """
        if not rows:
            raise ValueError("rows: give the labels, or another tensor with B rows")
        self._agree(inputs, rows)
        size = len(rows[0])
        here = self.slice_of(size)
        own = self._run(inputs, size)
        if self._runtime.world_size > 1:
            own = self._exchanged(own, size)
        outputs = [own[name] for name in self._names]
        result = self._summed[0](outputs, *(tensor[here] for tensor in rows))
        loss, *more = result if isinstance(result, tuple) else (result,)
        loss = self._of_all_ranks(loss * ((here.stop - here.start) / size))
        return (loss, *more) if isinstance(result, tuple) else loss

    def _agree(
        self, inputs: Mapping[str, Sequence[Any]], rows: tuple[Tensor, ...]
    ) -> None:
        """Compares the ranks' numbers of rows; at the first call and at another number, their values too."""
        size = len(rows[0])
        ends = torch.tensor([size, -size], device=self._runtime.device)
        if self._runtime.world_size > 1:
            dist.all_reduce(ends, dist.ReduceOp.MAX)
        most, least = ends.tolist()
        if most == -least == self._size:
            return
        values = {
            f"inputs['{name}']": _digest(inputs.get(name)) for name in self._names
        }
        mine = {"rows": f"{size} of {_digest(rows)}", **values}
        refuse_differences(mine, self._runtime.world_size)
        # Alike on every rank, since their values are.
        for name in self._names:
            if not isinstance(inputs.get(name), list | tuple):
                raise ValueError(
                    f"inputs: tower '{name}' has {type(inputs.get(name)).__name__}; give the tuple of its arguments, "
                    f"such as {{'{name}': (ids,)}}"
                )
        if size < self._runtime.world_size:
            raise ValueError(
                f"rows: {size} rows on {self._runtime.world_size} ranks, each of which needs one; make batches larger"
            )
        self._size = size

    def slice_of(self, size: int) -> slice:
        """Returns this rank's rows of a batch of ``size``; the first ranks have one more if it does not divide."""
        starts = self._starts(size)
        return slice(starts[self._runtime.rank], starts[self._runtime.rank + 1])

    def _starts(self, size: int) -> list[int]:
        each, more = divmod(size, self._runtime.world_size)
        return [
            rank * each + min(rank, more)
            for rank in range(self._runtime.world_size + 1)
        ]

    def _run(self, inputs: Mapping[str, Sequence[Any]], size: int) -> dict[str, Tensor]:
        outputs = {}
        for name, tower in self.towers.items():
            output = tower(*inputs[name])
            if output.dim() != 2 or len(output) != size:
                raise ValueError(
                    f"tower '{name}' returned {tuple(output.shape)} for {size} rows; a tower returns (B, D)"
                )
            outputs[name] = output
        return outputs

    def _exchanged(self, own: dict[str, Tensor], size: int) -> dict[str, Tensor]:
        """Returns the outputs of all towers for this rank's rows, by name."""
        by_rank = self._outputs_of_all(own)
        counts = [stop - start for start, stop in pairwise(self._starts(size))]
        here = counts[self._runtime.rank]
        dtype = next(of_rank.dtype for of_rank in by_rank if of_rank.dtype)
        # A rank without a tower sends nothing.
        nothing = torch.empty(size, 0, device=self._runtime.device, dtype=dtype)
        sent = torch.cat([nothing, *own.values()], dim=1)
        # Every rank takes part in the backward, also one whose towers have nothing to
        # learn.
        if torch.is_grad_enabled() and not sent.requires_grad:
            sent.requires_grad_()
        receiving = [here * sum(of_rank.widths.values()) for of_rank in by_rank]
        sending = [count * sent.shape[1] for count in counts]
        received = _Exchange.apply(sent.reshape(-1), receiving, sending)  # type: ignore[no-untyped-call]
        outputs: dict[str, Tensor] = {}
        for of_rank, block in zip(
            by_rank, torch.split(received, receiving), strict=True
        ):
            widths = list(of_rank.widths.values())
            columns = torch.split(block.view(here, sum(widths)), widths, dim=1)
            outputs |= zip(of_rank.widths, columns, strict=True)
        return outputs

    def _outputs_of_all(self, own: Mapping[str, Tensor]) -> list[_Outputs]:
        """Returns the form of all towers' outputs by rank; asked for once, as a tower has one width."""
        if not self._outputs:
            widths = {name: output.shape[1] for name, output in own.items()}
            dtype = next((output.dtype for output in own.values()), None)
            self._outputs = gather_objects(
                _Outputs(widths, dtype), self._runtime.world_size
            )
            dtypes = {of_rank.dtype for of_rank in self._outputs if of_rank.dtype}
            if len(dtypes) > 1:
                raise ValueError(
                    f"towers return {', '.join(sorted(map(str, dtypes)))}: one message holds all outputs; let them "
                    "return one dtype"
                )
        return self._outputs

    def _of_all_ranks(self, share: Tensor) -> Tensor:
        """Returns the sum of the ranks' shares of the loss, with the gradient of this rank's."""
        if self._runtime.world_size == 1:
            return share
        total = share.detach().clone()
        dist.all_reduce(total)
        return share + (total - share.detach())


class _Exchange(torch.autograd.Function):
    """``all_to_all_single`` with a gradient; torch's own with one is private, or warns on every rank."""

    @staticmethod
    def forward(
        ctx: Any, sent: Tensor, receiving: list[int], sending: list[int]
    ) -> Tensor:
        ctx.back = sending, receiving
        received = sent.new_empty(sum(receiving))
        dist.all_to_all_single(received, sent, receiving, sending)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Exchange.apply(gradient.contiguous(), *ctx.back), None, None  # type: ignore[no-untyped-call]


class _Outputs(NamedTuple):
    """The widths of a rank's towers' outputs by name, and their dtype; None without a tower."""

    widths: dict[str, int]
    dtype: torch.dtype | None


def _digest(values: Any) -> str:
    """Returns the sum of each dense tensor in ``values``, weighted so that another order of rows changes it.

    Of six digits, because hosts of other processors may round a batch in another way.
    """
    sums = []
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            flat = leaf.detach().double().reshape(-1).nan_to_num(0, 0, 0)
            places = torch.arange(1, len(flat) + 1, device=flat.device)
            sums.append(f"{float((flat * places).sum()):.6g}")
    return ", ".join(sums) or type(values).__name__


def _added_up(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]


def _refuse_others(names: Sequence[str], fault: str, runtime: Runtime) -> None:
    """Refuses, on every rank alike, ranks with other towers, or with a fault in theirs. Collective."""
    faults = [fault]
    # Without a process group nothing would run, but faults are named.
    if dist.is_available() and dist.is_initialized():
        refuse_differences({"towers": ", ".join(names)}, runtime.world_size)
        faults = gather_objects(fault, runtime.world_size)
    for each in faults:
        if each:
            raise ValueError(each)


def _fault(modules: Mapping[str, nn.Module | None], runtime: Runtime) -> str:
    """Names what keeps this rank's towers from running; empty if there is nothing.

    Args:
        modules: the towers by name, then the top.
        runtime: rank of this process.
    """
    *names, _ = modules
    for name in names[runtime.rank :: runtime.world_size]:
        if modules[name] is None:
            return f"towers: '{name}' is None on rank {runtime.rank}, which runs it; give that rank the module"
    owners: dict[nn.Parameter, str] = {}
    for name, module in modules.items():
        for path, parameter in [] if module is None else module.named_parameters():
            owner = owners.setdefault(parameter, name)
            if owner != name:
                return (
                    f"towers: '{owner}' and '{name}' share the parameter '{path}', which would be trained in two "
                    "places; make one tower of both, or give each its own"
                )
    return ""
