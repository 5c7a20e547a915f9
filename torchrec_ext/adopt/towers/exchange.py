"""OutputExchange: what ranks whose towers run apart send one another in a step, and in which form.

A step is up to four exchanges: the towers' outputs; the gradients of these outputs and, beside them, the sum of
the loss and of the gradients of everything outside of the towers (a large one is summed by itself, while the towers'
backward runs); the norm of all gradients where it is limited. What is sent is made, and what has arrived is read, by
functions of tensors, so that a captured step can take them up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.towers.subnetworks import Subnetwork
from torchrec_ext.distributed.runtime import Runtime, gather_objects

STEP = 0.0
SETTLE = 1.0
# numbers that travel beside the outputs' gradients, to all ranks together
_SMALL = 2**18
_NEAR = 1e-4  # of a tensor's greatest number: rounding is below

Result = TypeVar("Result")


class OutputHeader(NamedTuple):
    """What a rank is about to do, in front of the outputs of its towers; all numbers are float64.

    Args:
        call: a step, or settle().
        rows: B, rows of the batch.
        fingerprint: a number that tells batches apart.
        failed: 1 if the rank has met a problem.
        due: 1 if the rank finds that a capture is due.
    """

    call: float = STEP
    rows: float = 0.0
    fingerprint: float = 0.0
    failed: float = 0.0
    due: float = 0.0


@dataclass
class _Record:
    """What was exchanged in a step: each time what this rank sent, and what has arrived."""

    messages: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    next: int | None = None  # of those that are read again; None where ranks meet
    difference: str = ""

    def answer(self, pieces: Sequence[Tensor], name: str) -> Tensor:
        """Returns what has arrived in the next recorded exchange, and compares the message with the recorded one."""
        assert self.next is not None
        message, arrived = self.messages[self.next]
        self.next += 1
        for piece, before in zip(
            pieces, torch.split(message, [len(piece) for piece in pieces]), strict=True
        ):
            # The head is bits and no number: equal, or other ranks would not have gone
            # on.
            far = torch.nan_to_num(piece - before).abs()
            # Only the first difference is named: all that follow come of it.
            if len(piece) and float(far.max()) > _NEAR * float(
                torch.nan_to_num(piece).abs().max()
            ):
                self.difference = self.difference or name
        return arrived


class OutputExchange:
    """The exchanges of the steps of one model.

    Args:
        runtime: this process's rank and device.
        towers: all ranks' towers, observed on the example.
        top: parameters outside of the towers that optimizers move.
        dtype: dtype of the towers' outputs.
        rows: B, the rows of the example.

    Attributes:
        step: number of the step, for messages.
        capacity: rows of a share that an exchange of outputs has room for.
        due: whether some rank has announced, in the last exchange, that a capture is due.
        met: whether ranks have met in this step.
    """

    def __init__(
        self,
        runtime: Runtime,
        towers: Sequence[Subnetwork],
        top: Sequence[nn.Parameter],
        dtype: torch.dtype,
        rows: int,
    ) -> None:
        self._runtime = runtime
        self._towers = towers
        self._top = list(top)
        self.dtype = dtype
        self._sum_dtype = torch.float32
        for parameter in self._top:
            self._sum_dtype = torch.promote_types(self._sum_dtype, parameter.dtype)
        self._rank = runtime.rank
        self._ranks = runtime.world_size
        self._widths = [0] * self._ranks
        for tower in towers:
            self._widths[tower.rank] += tower.width
        self._width = self._widths[self._rank]
        self.grow(rows)
        self._total_sizes = [
            2 + len(self._top),
            *(parameter.numel() for parameter in self._top),
        ]
        self._total = sum(self._total_sizes)
        self.small = self._total * self._ranks <= _SMALL and self._sum_dtype == dtype
        # A small total stands in front of the outputs' gradients in their messages.
        self._start = self._total if self.small else 0
        self.step = 0
        self.due = False
        self.met = False
        self._record = _Record()

    def begin(self, step: int) -> None:
        """Begins a step."""
        self.step = step
        self.met = False
        self._record = _Record()

    def read_again(self) -> None:
        """Replays this step's exchanges from the recording, without communication."""
        self._record.next = 0

    @property
    def difference(self) -> str:
        """Names the message that differs on replay by more than rounding; empty if none does."""
        return self._record.difference

    def shares(self, rows: int) -> list[slice]:
        """Returns the rows of each rank; a rank for which there is none reads the first row, with weight 0."""
        shares = []
        for rank in range(self._ranks):
            start = rows * rank // self._ranks
            stop = rows * (rank + 1) // self._ranks
            shares.append(slice(start, stop) if stop > start else slice(0, 1))
        return shares

    def counts(self, rows: int) -> list[int]:
        """Returns the number of rows of each rank's share."""
        return [share.stop - share.start for share in self.shares(rows)]

    def weight(self, rows: int) -> float:
        """Returns the share of this rank's rows in a batch of so many."""
        # Not by shares(): a rank without rows has one there, and none here.
        return (
            rows * (self._rank + 1) // self._ranks - rows * self._rank // self._ranks
        ) / rows

    def fits(self, rows: int) -> bool:
        """Whether an exchange has room for a batch of so many rows."""
        return -(-rows // self._ranks) <= self.capacity

    def grow(self, rows: int) -> None:
        """Makes room for a batch of so many rows."""
        self.capacity = -(-rows // self._ranks)

    def share(self, rows: int) -> slice:
        """Returns the rows of this rank."""
        return self.shares(rows)[self._rank]

    def header(self, header: OutputHeader) -> Tensor:
        """Returns the head of an exchange of outputs, in the dtype of the outputs."""
        # Its bits in place of its numbers, which 16 bits could not hold.
        return (
            torch.tensor(header, dtype=torch.float64)
            .view(self.dtype)
            .to(self._runtime.device)
        )

    @property
    def message_sizes(self) -> list[int]:
        """Numbers of an exchange of outputs that come from each rank."""
        header = (
            len(OutputHeader._fields) * torch.float64.itemsize // self.dtype.itemsize
        )
        return [header + self.capacity * width for width in self._widths]

    def blanks(self, rows: int, *, late: bool) -> list[Tensor]:
        """Returns zeros in the shapes that a step receives; ``late`` adds the norm and a large total."""
        outputs = self.empty(sum(self.message_sizes)).zero_()
        gradients = self.empty(sum(self._gradient_sizes(rows))).zero_()
        if not late:
            return [outputs, gradients]
        norm = self.zero()
        if not self.small:
            norm = torch.zeros(
                1 + self._total, dtype=self._sum_dtype, device=self._runtime.device
            )
        return [outputs, gradients, norm]

    def zero(self) -> Tensor:
        """Returns (1,) zero in place of a norm without a limit."""
        return torch.zeros(1, device=self._runtime.device)

    def give_up(self, rows: int) -> None:
        """Sends zero gradients, with a flag for the failure of this rank. Collective."""
        total = self.total(self.zero(), [None] * len(self._top), failed=True)
        size = self.counts(rows)[self._rank]
        leaves = []
        for tower in self._towers:
            leaves += [
                self.empty(size * shape.numel()).zero_() for shape in tower.shapes
            ]
        self.exchange_gradients(self.returning(leaves, total), rows)
        if not self.small:
            self.sum_ended(self.sum_begun(total))

    def outgoing(
        self, header: Tensor, outputs: Sequence[Tensor], rows: int
    ) -> list[Tensor]:
        """Splits the outputs (B, ...) of this rank's towers into pieces of messages; without outputs, zeros."""
        pieces = []
        for share in self.shares(rows):
            filled = (share.stop - share.start) * self._width if outputs else 0
            padding = self.empty(self.capacity * self._width - filled).zero_()
            pieces += [
                header,
                *(output.detach()[share].reshape(-1) for output in outputs),
                padding,
            ]
        return pieces

    def received(self, flat: Tensor, rows: int) -> list[Tensor]:
        """Returns the outputs of all towers for this rank's rows, (b, ...) each, as leaves that take gradients."""
        size = self.counts(rows)[self._rank]
        of_ranks = []
        for rank, (piece, width) in enumerate(
            zip(torch.split(flat, self.message_sizes), self._widths, strict=True)
        ):
            # In front stands the header, and behind the rows the room for a larger
            # batch.
            body = piece[len(piece) - self.capacity * width :]
            of_ranks.append(iter(self._split(rank, body[: size * width], size)))
        leaves = []
        for tower in self._towers:
            for _ in tower.shapes:
                leaves.append(next(of_ranks[tower.rank]).detach().requires_grad_())
        return leaves

    def total(
        self, loss: Tensor, gradients: Sequence[Tensor | None], *, failed: bool = False
    ) -> Tensor:
        """Returns the flat all-reduce buffer: the loss, flags, and the gradients of all outside of the towers."""
        flags = [
            float(failed),
            *(float(gradient is not None) for gradient in gradients),
        ]
        pieces = [
            loss.detach().reshape(1),
            torch.tensor(flags, device=self._runtime.device),
        ]
        pieces += [
            summand.reshape(-1) for summand in zeros_for_none(gradients, self._top)
        ]
        return torch.cat([piece.to(self._sum_dtype) for piece in pieces])

    def returning(self, gradients: Sequence[Tensor], total: Tensor) -> list[Tensor]:
        """Splits the gradients of :meth:`received` into messages per rank, each with a small total in front."""
        leaves = iter(gradients)
        total_pieces = torch.split(total, self._total_sizes) if self.small else ()
        to_ranks: list[list[Tensor]] = [list(total_pieces) for _ in self._widths]
        for tower in self._towers:
            to_ranks[tower.rank] += [next(leaves).reshape(-1) for _ in tower.shapes]
        # Without towers and with a large total there is nothing else to concatenate.
        return [self.empty(0), *itertools.chain(*to_ranks)]

    def arrived(self, flat: Tensor, rows: int) -> tuple[list[Tensor], Tensor | None]:
        """Returns the gradients (B, ...) of this rank's outputs from all ranks, and the sum of a small total."""
        by_rank = torch.split(flat, self._gradient_sizes(rows))
        shapes = self._shapes(self._rank)
        gradients = [
            self.empty(rows * shape.numel()).zero_().view(rows, *shape)
            for shape in shapes
        ]
        for share, piece in zip(self.shares(rows), by_rank, strict=True):
            leaves = self._split(
                self._rank, piece[self._start :], share.stop - share.start
            )
            for gradient, each in zip(gradients, leaves, strict=True):
                # Added, because ranks without rows of their own read the first row,
                # with weight 0.
                gradient[share] += each
        if not self.small:
            return gradients, None
        return gradients, torch.stack([piece[: self._start] for piece in by_rank]).sum(
            0
        )

    def split_total(self, total: Tensor) -> list[Tensor]:
        """Returns the gradients of everything outside of the towers from a total."""
        pieces = torch.split(total, self._total_sizes)[1:]
        return [
            piece.view_as(p).to(p.dtype)
            for p, piece in zip(self._top, pieces, strict=True)
        ]

    def numbers(self, total: Tensor) -> list[float]:
        """Returns the loss of the whole batch, how many ranks have failed, and how many have each of the gradients."""
        return total[: self._total_sizes[0]].tolist()

    def small_total(self, flat: Tensor, rows: int) -> Tensor:
        """Sums loss and flags over the received small totals, for :meth:`numbers`."""
        pieces = torch.split(flat, self._gradient_sizes(rows))
        return torch.stack([piece[: self._total_sizes[0]] for piece in pieces]).sum(0)

    def exchange_outputs(
        self, pieces: Sequence[Tensor], problem: Exception | None = None
    ) -> Tensor:
        """Sends :meth:`outgoing`, and compares what all ranks are about to do. Collective.

        Raises:
            CannotAdopt: ranks do different things, or another one has met a problem; all raise alike.
        """
        self.met = True
        sizes = self.message_sizes
        flat = self._exchange(
            pieces, sizes, [sizes[self._rank]] * len(sizes), "the outputs of its towers"
        )
        if self._record.next is None:
            size = len(self.header(OutputHeader()))
            headers = []
            for piece in torch.split(flat, sizes):
                # A copy, because a view as float64 needs an aligned offset.
                headers.append(
                    OutputHeader(*piece[:size].clone().view(torch.float64).tolist())
                )
            self.due = any(header.due for header in headers)
            _refuse_different(headers, problem, self.step)
        return flat

    def exchange_gradients(self, pieces: Sequence[Tensor], rows: int) -> Tensor:
        """Sends :meth:`returning`. Collective."""
        size = self.counts(rows)[self._rank]
        counts_sent = [self._start + size * width for width in self._widths]
        return self._exchange(
            pieces,
            self._gradient_sizes(rows),
            counts_sent,
            "the gradients of the outputs",
        )

    def _gradient_sizes(self, rows: int) -> list[int]:
        """Returns the numbers of an exchange of gradients that come from each rank."""
        return [self._start + count * self._width for count in self.counts(rows)]

    def sum_begun(self, total: Tensor) -> Any:
        """Begins to sum a large total over the ranks, in place; returns what :meth:`sum_ended` takes. Collective."""
        if self._record.next is None:
            # The sum is made in place, and what was sent is compared when the exchange
            # is replayed.
            return total.clone(), total, dist.all_reduce(total, async_op=True)
        return total, None, None

    def sum_ended(self, begun: Any) -> Tensor:
        """Returns the sum over the ranks of a large total."""
        message, total, work = begun
        if work is None:
            pieces = torch.split(message, self._total_sizes)
            return self._record.answer(pieces, "the gradients outside of the towers")
        self.wait(work)
        self._record.messages.append((message, total))
        return total  # type: ignore[no-any-return]

    def sum_of(self, squares: Tensor) -> Tensor:
        """Returns the sum of (1,) over the ranks. Collective."""
        if self._record.next is not None:
            return self._record.answer([squares], "the norm of the gradients")
        total = squares.clone()
        self.wait(dist.all_reduce(total, async_op=True))
        self._record.messages.append((squares, total))
        return total

    def raise_together(self, problem: Exception | None) -> None:
        """Raises on all ranks if some of them have met a problem. Collective."""
        raise_together(problem, self._ranks, self.step)

    def wait(self, work: Any) -> None:
        """Waits for the other ranks."""
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"step {self.step}: a rank did not come to the exchange within {self._runtime.timeout_s:.0f} s: it "
                f"raised, ended, or makes fewer steps: {error}"
            ) from error

    def empty(self, size: int) -> Tensor:
        """Returns numbers of the outputs' dtype, not initialised, (size,)."""
        return torch.empty(size, dtype=self.dtype, device=self._runtime.device)

    def _exchange(
        self, pieces: Sequence[Tensor], sizes: list[int], counts: list[int], name: str
    ) -> Tensor:
        if self._record.next is not None:
            return self._record.answer(pieces, name)
        message = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
        flat = self.empty(sum(sizes))
        self.wait(dist.all_to_all_single(flat, message, sizes, counts, async_op=True))
        self._record.messages.append((message, flat))
        return flat

    def _shapes(self, rank: int) -> list[torch.Size]:
        """Returns the shapes of the leaves of the outputs of a rank's towers, without the rows."""
        shapes: list[torch.Size] = []
        for tower in self._towers:
            if tower.rank == rank:
                shapes += tower.shapes
        return shapes

    def _split(self, rank: int, flat: Tensor, rows: int) -> list[Tensor]:
        """Returns the leaves of the outputs of a rank's towers for so many rows, (rows, ...) each."""
        shapes = self._shapes(rank)
        pieces = (
            torch.split(flat, [rows * shape.numel() for shape in shapes])
            if shapes
            else ()
        )
        return [
            piece.view(rows, *shape)
            for piece, shape in zip(pieces, shapes, strict=True)
        ]


def _refuse_different(
    headers: Sequence[OutputHeader], problem: Exception | None, step: int
) -> None:
    """Raises alike on all ranks where they are about to do different things, or some cannot."""
    if len({header.call for header in headers}) > 1:
        names = ", ".join(
            "settle()" if header.call == SETTLE else "a step" for header in headers
        )
        raise CannotAdopt(
            f"step {step}: ranks came to different calls ({names}): every rank makes the same number of steps, and "
            "calls settle() after the same one"
        )
    if any(header.failed for header in headers):
        raise_together(problem, len(headers), step)
    if len({(header.rows, header.fingerprint) for header in headers}) > 1:
        sizes = ", ".join(f"{header.rows:.0f}" for header in headers)
        raise CannotAdopt(
            f"step {step}: ranks have different batches (of {sizes} rows) or modes; give every rank the same whole "
            "batch in the same order, all in train or all in eval mode"
        )


def zeros_for_none(
    gradients: Sequence[Tensor | None], tensors: Sequence[Tensor]
) -> list[Tensor]:
    """Returns the gradients of tensors, zeros where one has none: each has a place in a message."""
    summands = []
    for gradient, tensor in zip(gradients, tensors, strict=True):
        summands.append(torch.zeros_like(tensor) if gradient is None else gradient)
    return summands


def squared_norm(gradients: Sequence[Tensor], exchange: OutputExchange) -> Tensor:
    """Returns the sum of the squares of some gradients, (1,)."""
    squares = []
    for gradient in gradients:
        # A row that a sparse gradient holds twice counts as the sum of both.
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        squares.append(values.float().square().sum())
    return torch.stack(squares).sum().reshape(1) if squares else exchange.zero()


def together(runtime: Runtime, check: Callable[[], Result]) -> Result:
    """Runs a check of this rank alone, and returns its result; if it fails on any rank, raises on all. Collective."""
    try:
        result = check()
    except Exception as error:
        raise_together(error, runtime.world_size, 0)
        raise
    raise_together(None, runtime.world_size, 0)
    return result


def raise_together(problem: Exception | None, world_size: int, step: int) -> None:
    """Raises on all ranks where some of them have met a problem in a step. Collective."""
    own_text = None
    if problem is not None:
        own_text = f"{type(problem).__name__}: {problem}"
    texts = gather_objects(own_text, world_size)
    if problem is not None:
        raise problem
    for rank, text in enumerate(texts):
        if text is not None:
            raise CannotAdopt(
                f"step {step}: rank {rank} raised {text}; no weight was changed"
            )
