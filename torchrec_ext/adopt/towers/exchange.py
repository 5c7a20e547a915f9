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
from torch import Tensor

from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.towers.split import TowerSplit
from torchrec_ext.distributed.runtime import Runtime, gather_objects

STEP = 0.0
SETTLE = 1.0
# Numbers that travel beside the outputs' gradients, to all ranks together.
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


class MessageLayout:
    """Places the rows of each rank and the parts of each message, by functions of tensors.

    Args:
        split: what each rank runs of the model.

    Attributes:
        device: this rank's device.
        dtype: dtype of the towers' outputs.
        capacity: rows of a share that an exchange of outputs has room for.
        small: whether the total travels with the gradients of the outputs.
        total_sizes: numbers of the loss and flags, and of each gradient, in a total.
    """

    def __init__(self, split: TowerSplit) -> None:
        self.device = split.runtime.device
        self.dtype = split.dtype
        self._towers = split.towers
        self._top = split.top
        self._sum_dtype = torch.float32
        for parameter in self._top:
            self._sum_dtype = torch.promote_types(self._sum_dtype, parameter.dtype)
        self._rank = split.runtime.rank
        self._ranks = split.runtime.world_size
        self._widths = [0] * self._ranks
        for tower in split.towers:
            self._widths[tower.rank] += tower.width
        self._shapes: list[torch.Size] = []
        for tower in split.local:
            self._shapes += tower.shapes
        self._width = self._widths[self._rank]
        header = len(OutputHeader._fields) * torch.float64.itemsize
        self._head = header // self.dtype.itemsize
        self.grow(split.rows)
        self.total_sizes = [2 + len(self._top)]
        self.total_sizes += [parameter.numel() for parameter in self._top]
        self._total = sum(self.total_sizes)
        is_alike = self._sum_dtype == self.dtype
        self.small = self._total * self._ranks <= _SMALL and is_alike
        # A small total stands in front of the outputs' gradients in their messages.
        self._start = self._total if self.small else 0

    def shares(self, rows: int) -> list[slice]:
        """Returns the rows of each rank; a rank for which there is none reads the first row, with weight 0."""
        bounds = [rows * rank // self._ranks for rank in range(self._ranks + 1)]
        shares = []
        for start, stop in itertools.pairwise(bounds):
            shares.append(slice(start, stop) if stop > start else slice(0, 1))
        return shares

    def share(self, rows: int) -> slice:
        """Returns the rows of this rank."""
        return self.shares(rows)[self._rank]

    def counts(self, rows: int) -> list[int]:
        """Returns the number of rows of each rank's share."""
        return [share.stop - share.start for share in self.shares(rows)]

    def weight(self, rows: int) -> float:
        """Returns the share of this rank's rows in a batch of so many."""
        # Not by shares(): a rank without rows has one there, and none here.
        start = rows * self._rank // self._ranks
        return (rows * (self._rank + 1) // self._ranks - start) / rows

    def fits(self, rows: int) -> bool:
        """Whether an exchange has room for a batch of so many rows."""
        return -(-rows // self._ranks) <= self.capacity

    def grow(self, rows: int) -> None:
        """Makes room for a batch of so many rows."""
        self.capacity = -(-rows // self._ranks)

    def header(self, header: OutputHeader) -> Tensor:
        """Returns the head of an exchange of outputs, in the dtype of the outputs."""
        # Its bits in place of its numbers, which 16 bits could not hold.
        numbers = torch.tensor(header, dtype=torch.float64)
        return numbers.view(self.dtype).to(self.device)

    def headers(self, flat: Tensor) -> list[OutputHeader]:
        """Returns the heads of an exchange of outputs that have arrived, by rank."""
        headers = []
        for piece in torch.split(flat, self.sizes_of_outputs):
            # A copy, because a view as float64 needs an aligned offset.
            numbers = piece[: self._head].clone().view(torch.float64).tolist()
            headers.append(OutputHeader(*numbers))
        return headers

    @property
    def sizes_of_outputs(self) -> list[int]:
        """Numbers of an exchange of outputs that come from each rank."""
        return [self._head + self.capacity * width for width in self._widths]

    def sizes_of_gradients(self, rows: int) -> list[int]:
        """Returns the numbers of an exchange of gradients that come from each rank."""
        return [self._start + count * self._width for count in self.counts(rows)]

    def sent_gradients(self, rows: int) -> list[int]:
        """Returns the numbers of an exchange of gradients that go to each rank."""
        count = self.counts(rows)[self._rank]
        return [self._start + count * width for width in self._widths]

    def zeros(self, size: int) -> Tensor:
        """Returns (size,) zeros of the outputs' dtype."""
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    def blanks(self, rows: int, *, late: bool) -> list[Tensor]:
        """Returns zeros in the shapes that a step receives; ``late`` adds the norm and a large total."""
        blanks = [
            self.zeros(sum(self.sizes_of_outputs)),
            self.zeros(sum(self.sizes_of_gradients(rows))),
        ]
        if late:
            size = 1 + self._total - self._start
            blank = torch.zeros(size, dtype=self._sum_dtype, device=self.device)
            blanks.append(blank)
        return blanks

    def outgoing(
        self, header: Tensor, outputs: Sequence[Tensor], rows: int
    ) -> list[Tensor]:
        """Splits the outputs (B, ...) of this rank's towers into pieces of messages; without outputs, zeros."""
        pieces = []
        for share in self.shares(rows):
            pieces.append(header)
            padding = self.capacity * self._width
            if outputs:
                padding -= (share.stop - share.start) * self._width
                pieces += [output.detach()[share].reshape(-1) for output in outputs]
            pieces.append(self.zeros(padding))
        return pieces

    def received(self, flat: Tensor, rows: int) -> list[Tensor]:
        """Returns the outputs of all towers for this rank's rows, (b, ...) each, as leaves that take gradients."""
        size = self.counts(rows)[self._rank]
        # In front stands the header, and behind the rows the room for a larger batch.
        bodies = []
        for piece, width in zip(
            torch.split(flat, self.sizes_of_outputs), self._widths, strict=True
        ):
            bodies.append(piece[len(piece) - self.capacity * width :][: size * width])
        leaves = []
        for tower in self._towers:
            body = bodies[tower.rank]
            mine = size * tower.width
            leaves += _split(body[:mine], tower.shapes, size)
            bodies[tower.rank] = body[mine:]
        return [leaf.detach().requires_grad_() for leaf in leaves]

    def total(
        self, loss: Tensor, gradients: Sequence[Tensor | None], *, failed: bool = False
    ) -> Tensor:
        """Returns the flat all-reduce buffer: the loss, flags, and the gradients of all outside of the towers."""
        flags = [float(failed)]
        flags += [float(gradient is not None) for gradient in gradients]
        pieces = [loss.detach(), torch.tensor(flags, device=self.device)]
        pieces += zeros_for_none(gradients, self._top)
        return torch.cat([piece.reshape(-1).to(self._sum_dtype) for piece in pieces])

    def returning(self, gradients: Sequence[Tensor], total: Tensor) -> list[Tensor]:
        """Splits the gradients of :meth:`received` into messages per rank, each with a small total in front."""
        leaves = iter(gradients)
        total_pieces = torch.split(total, self.total_sizes) if self.small else ()
        to_ranks: list[list[Tensor]] = [list(total_pieces) for _ in self._widths]
        for tower in self._towers:
            to_ranks[tower.rank] += [next(leaves).reshape(-1) for _ in tower.shapes]
        # Without towers and with a large total there is nothing else to concatenate.
        return [self.zeros(0), *itertools.chain(*to_ranks)]

    def failed(self, rows: int) -> tuple[list[Tensor], Tensor]:
        """Returns zero gradients as :meth:`returning` does, and a total with the flag of a failure."""
        total = self.total(self.zeros(1), [None] * len(self._top), failed=True)
        outputs = self.received(self.zeros(sum(self.sizes_of_outputs)), rows)
        zeros = [output.detach() for output in outputs]
        return self.returning(zeros, total), total

    def arrived(self, flat: Tensor, rows: int) -> tuple[list[Tensor], Tensor | None]:
        """Returns the gradients (B, ...) of this rank's outputs from all ranks, and the sum of a small total."""
        by_rank = torch.split(flat, self.sizes_of_gradients(rows))
        gradients = [
            self.zeros(rows * shape.numel()).view(rows, *shape)
            for shape in self._shapes
        ]
        for share, piece in zip(self.shares(rows), by_rank, strict=True):
            count = share.stop - share.start
            leaves = _split(piece[self._start :], self._shapes, count)
            for gradient, leaf in zip(gradients, leaves, strict=True):
                # Added, because ranks without rows of their own read the first row,
                # with weight 0.
                gradient[share] += leaf
        if not self.small:
            return gradients, None
        return gradients, _sum_of_starts(by_rank, self._start)

    def small_total(self, flat: Tensor, rows: int) -> Tensor:
        """Sums loss and flags over the received small totals, for :meth:`numbers`."""
        by_rank = torch.split(flat, self.sizes_of_gradients(rows))
        return _sum_of_starts(by_rank, self.total_sizes[0])

    def split_total(self, total: Tensor) -> list[Tensor]:
        """Returns the gradients of everything outside of the towers from a total."""
        _, *pieces = torch.split(total, self.total_sizes)
        return [
            piece.view_as(parameter).to(parameter.dtype)
            for parameter, piece in zip(self._top, pieces, strict=True)
        ]

    def numbers(self, total: Tensor) -> list[float]:
        """Returns the loss of the whole batch, how many ranks have failed, and how many have each of the gradients."""
        return total[: self.total_sizes[0]].tolist()


class OutputExchange:
    """The exchanges of the steps of one model.

    Args:
        split: what each rank runs of the model.

    Attributes:
        layout: what stands where in the messages.
        step: number of the step, for messages.
        due: whether some rank has announced, in the last exchange, that a capture is due.
        met: whether ranks have met in this step.
    """

    def __init__(self, split: TowerSplit) -> None:
        self.layout = MessageLayout(split)
        self._runtime = split.runtime
        self.due = False
        self.begin(0)

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

    def give_up(self, rows: int) -> None:
        """Sends zero gradients, with a flag for the failure of this rank. Collective."""
        pieces, total = self.layout.failed(rows)
        self.exchange_gradients(pieces, rows)
        if not self.layout.small:
            self.sum_ended(self.sum_begun(total))

    def exchange_outputs(
        self, pieces: Sequence[Tensor], problem: Exception | None = None
    ) -> Tensor:
        """Sends :meth:`MessageLayout.outgoing`, and compares what all ranks are about to do. Collective.

        Raises:
            CannotAdopt: ranks do different things, or another one has met a problem; all raise alike.
        """
        self.met = True
        sizes = self.layout.sizes_of_outputs
        counts = [sizes[self._runtime.rank]] * len(sizes)
        flat = self._exchange(pieces, sizes, counts, "the outputs of its towers")
        if self._record.next is None:
            headers = self.layout.headers(flat)
            self.due = any(header.due for header in headers)
            _refuse_different(headers, problem, self.step)
        return flat

    def exchange_gradients(self, pieces: Sequence[Tensor], rows: int) -> Tensor:
        """Sends :meth:`MessageLayout.returning`. Collective."""
        sizes = self.layout.sizes_of_gradients(rows)
        counts = self.layout.sent_gradients(rows)
        return self._exchange(pieces, sizes, counts, "the gradients of the outputs")

    def _exchange(
        self, pieces: Sequence[Tensor], sizes: list[int], counts: list[int], name: str
    ) -> Tensor:
        if self._record.next is not None:
            return self._record.answer(pieces, name)
        message = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
        flat = message.new_empty(sum(sizes))
        self._wait(dist.all_to_all_single(flat, message, sizes, counts, async_op=True))
        self._record.messages.append((message, flat))
        return flat

    def sum_begun(self, total: Tensor) -> Any:
        """Begins to sum a large total over the ranks, in place; returns what :meth:`sum_ended` takes. Collective."""
        if self._record.next is None:
            # The sum is made in place, and what was sent is compared when the exchange
            # is replayed.
            return total.clone(), total, dist.all_reduce(total, async_op=True)
        return total, None, None

    def sum_ended(self, begun: Any) -> Tensor:
        """Returns the sum over the ranks of a large total."""
        sizes = self.layout.total_sizes
        return self._sum(begun, sizes, "the gradients outside of the towers")

    def sum_of(self, squares: Tensor) -> Tensor:
        """Returns the sum of (1,) over the ranks. Collective."""
        begun = self.sum_begun(squares.clone())
        return self._sum(begun, [1], "the norm of the gradients")

    def _sum(self, begun: Any, sizes: list[int], name: str) -> Tensor:
        message, total, work = begun
        if work is None:
            return self._record.answer(torch.split(message, sizes), name)
        self._wait(work)
        self._record.messages.append((message, total))
        return total  # type: ignore[no-any-return]

    def raise_together(self, problem: Exception | None) -> None:
        """Raises on all ranks if some of them have met a problem. Collective."""
        raise_together(problem, self._runtime.world_size, self.step)

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"step {self.step}: a rank did not come to the exchange within {self._runtime.timeout_s:.0f} s: it "
                f"raised, ended, or makes fewer steps: {error}"
            ) from error


def _sum_of_starts(pieces: Sequence[Tensor], size: int) -> Tensor:
    return torch.stack([piece[:size] for piece in pieces]).sum(0)


def _split(flat: Tensor, shapes: Sequence[torch.Size], rows: int) -> list[Tensor]:
    """Returns leaves of so many rows, (rows, ...) each, which stand one after the other."""
    if not shapes:
        return []
    pieces = torch.split(flat, [rows * shape.numel() for shape in shapes])
    return [
        piece.view(rows, *shape) for piece, shape in zip(pieces, shapes, strict=True)
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


def squared_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the sum of the squares of some gradients, (1,)."""
    if not gradients:
        return torch.zeros(1, device=device)
    squares = []
    for gradient in gradients:
        # A row that a sparse gradient holds twice counts as the sum of both.
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        squares.append(values.float().square().sum())
    return torch.stack(squares).sum().reshape(1)


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
