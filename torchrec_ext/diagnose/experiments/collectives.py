"""Collectives: each collective of a step watched, timed or left out: the user's own, DDP's, TorchRec's.

All of them are ops of the dispatcher (``c10d::allreduce_`` and its like), in whose place a kernel of ours stands
while :meth:`Collectives.watching` is open. It sees what C++ calls too, and costs nothing if none is called.

A collective that would wait for a rank which has raised raises :class:`OtherRankError` in its place.

:class:`Ranks` are the ranks that diagnose together, and the group in which they agree.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple

import torchrec_ext.needs_torch  # noqa: F401

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup, Work

from torchrec_ext.distributed.runtime import gather_objects
from torchrec_ext.observe.ops import tensors_in
from torchrec_ext.observe.user_lines import calling_line, described

Mode = Literal["watch", "trace", "record", "replay"]
# Between two looks for an error of another rank: each look is a request to the store.
_POLL_S = 0.25
_numbers = itertools.count()
_SAME = {
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allreduce_coalesced_": "all_reduce",
}
_OTHER = {  # what is received stands before what is sent
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "gather_": "gather",
    "scatter_": "scatter",
}
_NAMES = {**_SAME, **_OTHER, "barrier": "barrier"}


class OtherRankError(RuntimeError):
    """Another rank has raised, and this one would have waited for it."""


class Call(NamedTuple):
    """A collective as one rank called it.

    Args:
        name: ``all_reduce`` and so on.
        line: the user's line; ``backward`` or ``optimizer`` below these.
        ranks: ranks of its group.
        bytes: bytes that this rank gives to it.
        begin: moment of its call, as the clock of the moments returns it.
        end: moment at which it was complete.
    """

    name: str
    line: str
    ranks: tuple[int, ...]
    bytes: int
    begin: Any
    end: Any


class Failures:
    """The errors of ranks, shared through a store.

    Args:
        store: a store of the process group.
        key: a key of it that is used for this alone.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store = store
        self._key = key

    def tell(self, text: str) -> None:
        """Tells the other ranks about an error of this one."""
        self._store.set(self._key, text)

    def text(self) -> str:
        """Returns the error of the first rank with one; empty if there is none."""
        # Asked for first, because a store's get waits for a key that nobody has set.
        if not self._store.check([self._key]):
            return ""
        return str(self._store.get(self._key).decode())


class Collectives:
    """Watches the collectives of this process while :meth:`watching` is open.

    Args:
        failures: what ranks have raised.
        moment: returns the present moment; its results are kept as they are.

    Attributes:
        calls: what was called in ``trace`` mode; whoever reads it clears it.
        failures: what ranks have raised.
        failure: what another rank has raised while collectives were watched last; empty if none has. A collective
            that C++ waits for raises it as a RuntimeError.
    """

    def __init__(
        self, failures: Failures, moment: Callable[[], Any] = time.perf_counter
    ) -> None:
        self.calls: list[Call] = []
        self.failures = failures
        self._moment = moment
        self._mode: Mode = "watch"
        self._recorded: list[tuple[str, list[Tensor]]] = []
        self._next = 0
        self._open: set[torch.futures.Future[Any]] = set()
        self._lock = threading.Lock()
        self._settling = threading.Lock()
        self._waiter = ThreadPoolExecutor(1)
        self.failure = ""

    @contextmanager
    def watching(self, mode: Mode, recorded: list[Any] | None = None) -> Iterator[None]:
        """Stands in place of the collectives meanwhile.

        Args:
            mode: ``watch`` lets them run as they are; ``trace`` also completes and times each where it is called;
                ``record`` also keeps what each returns; ``replay`` calls none of them, and hands back what was kept.
            recorded: list that ``record`` fills and ``replay`` reads.

        Raises:
            OtherRankError: out of a collective that would wait for a rank that has raised.
        """
        self._mode = mode
        self._recorded = [] if recorded is None else recorded
        self._next = 0
        self.failure = ""
        library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        stop = threading.Event()
        poll = threading.Thread(target=self._poll, args=(stop,), daemon=True)
        try:
            for name in _NAMES:
                # Under autograd's keys, so that the kernels of c10d stand below and can
                # be called from here.
                for key in ("AutogradCPU", "AutogradCUDA"):
                    library.impl(name, self._kernel(name), key, with_keyset=True)  # type: ignore[no-untyped-call]
            if mode == "watch":
                poll.start()
            yield
        finally:
            stop.set()
            library._destroy()  # type: ignore[no-untyped-call]
            if mode == "watch":
                poll.join()

    def rewind(self, recorded: list[Any]) -> None:
        """Begins to replay a step from its recording."""
        self._recorded = recorded
        self._next = 0

    @contextmanager
    def real(self) -> Iterator[None]:
        """Lets collectives run meanwhile, in ``replay`` mode too."""
        mode = self._mode
        self._mode = "watch"
        try:
            yield
        finally:
            self._mode = mode

    def _poll(self, stop: threading.Event) -> None:
        """Ends this rank's waits after an error of another rank."""
        while not stop.wait(_POLL_S):
            text = self._failure()
            if not text:
                continue
            with self._lock:
                self.failure = text
                waiting = list(self._open)
            # A rank cannot be woken in gloo or NCCL, but the future that it waits for
            # is ours.
            for future in waiting:
                self._settle(future, OtherRankError(text))
            return

    def _kernel(self, name: str) -> Callable[..., Any]:
        op = getattr(torch.ops.c10d, name).default
        below = torch._C._after_autograd_keyset
        returns_tensors = len(op._schema.returns) == 2

        def kernel(keyset: Any, *args: Any) -> Any:
            outputs = tensors_in(args[0])
            inputs = tensors_in(args[1]) if name in _OTHER else outputs
            if self._mode == "replay":
                self._hand_back(name, outputs)
                arrived: torch.futures.Future[Any] = torch.futures.Future()
                # DDP's reducer reads the tensors from the future.
                arrived.set_result(outputs)
                work = _work_of(arrived)
                result = args
            else:
                begin = self._moment()
                result = op.redispatch(keyset & below, *args)
                work = Work.unbox(result[1] if returns_tensors else result)
                if any(each.is_cuda for each in inputs):
                    if self._mode != "watch":
                        work.wait()
                        torch.cuda.synchronize()
                elif self._mode == "watch":
                    work = self._guarded(work, outputs)
                else:
                    self._complete(work)
                if self._mode == "trace":
                    ranks = tuple(
                        dist.get_process_group_ranks(ProcessGroup.unbox(_group(args)))
                    )
                    # A barrier's tensor is a stand-in of c10d's own.
                    count = (
                        0 if name == "barrier" else sum(each.nbytes for each in inputs)
                    )
                    self.calls.append(
                        Call(
                            _NAMES[name],
                            calling_line(),
                            ranks,
                            count,
                            begin,
                            self._moment(),
                        )
                    )
                elif self._mode == "record" and name in _OTHER:
                    self._recorded.append((name, [each.clone() for each in outputs]))
            return (result[0], work.boxed()) if returns_tensors else work.boxed()

        return kernel

    def _complete(self, work: Work) -> None:
        """Waits for a collective, or until another rank has raised."""
        while True:
            try:
                work.wait(timedelta(seconds=_POLL_S))
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            if text := self._failure():
                self.failure = text
                raise OtherRankError(text)

    def _failure(self) -> str:
        try:
            return self.failures.text()
        except RuntimeError:
            return "the rank that holds the store has ended"

    def _guarded(self, work: Work, outputs: Sequence[Tensor]) -> Work:
        """Returns a work that also ends with an error of another rank."""
        first: torch.futures.Future[Any] = torch.futures.Future()
        # What Future.set_exception sets is raised by Python alone; C++, as DDP's
        # reducer, sees what a callback raises.
        future = first.then(_value)
        with self._lock:
            self._open.add(first)
            failure = self.failure
        results = [each.detach() for each in outputs]

        def finish(outcome: Callable[[], object]) -> None:
            value: Any = results
            try:
                outcome()
            except Exception as error:
                value = error
            with self._lock:
                self._open.discard(first)
            self._settle(first, value)

        if failure:
            self._settle(first, OtherRankError(failure))
        try:
            work.get_future().add_done_callback(
                lambda completed: finish(completed.value)
            )
        except RuntimeError:  # gloo has none for some, such as reduce_scatter
            self._waiter.submit(finish, partial(self._complete, work))
        return _work_of(future)

    def _settle(self, future: torch.futures.Future[Any], value: Any) -> None:
        """Sets a future's value, unless another thread has."""
        with self._settling:
            if not future.done():
                future.set_result(value)

    def _hand_back(self, name: str, outputs: Sequence[Tensor]) -> None:
        """Writes the recorded results; the tensors of an all_reduce stay this rank's own."""
        if name not in _OTHER:
            return
        if self._next >= len(self._recorded):
            raise RuntimeError(
                f"the step calls more collectives than it did: {_NAMES[name]}"
            )
        before, results = self._recorded[self._next]
        self._next += 1
        if before != name:
            raise RuntimeError(
                f"the step calls {_NAMES[name]} where it called {_NAMES[before]}"
            )
        if [(each.shape, each.dtype) for each in outputs] != [
            (each.shape, each.dtype) for each in results
        ]:
            raise RuntimeError(
                f"what {_NAMES[name]} exchanges has other sizes than it had, so it cannot be left out"
            )
        with torch.no_grad():
            for each, value in zip(outputs, results, strict=True):
                each.copy_(value)


def _work_of(future: torch.futures.Future[Any]) -> Work:
    work: Work = c10d._create_work_from_future(future)  # type: ignore[attr-defined]
    return work


def _value(future: torch.futures.Future[Any]) -> Any:
    value = future.value()
    if isinstance(value, Exception):
        raise value
    return value


def _group(args: Sequence[Any]) -> Any:
    return next(each for each in args if isinstance(each, torch.ScriptObject))


class RanksFailedError(RuntimeError):
    """The step cannot be run on all ranks.

    Args:
        text: what went wrong.
        names_rank: whether the text begins with the rank that raised.
    """

    def __init__(self, text: str, *, names_rank: bool = False) -> None:
        super().__init__(text)
        self.names_rank = names_rank


class Ranks:
    """The ranks of a diagnosis, and their own process group.

    Every rank makes it, and calls its methods in the same order.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        # A group of its own, so that what the diagnosis exchanges never meets the
        # step's collectives.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(minutes=10))
        self._key = f"torchrec_ext/why_slow/{next(_numbers)}"
        self._sections = 0
        self.failures = self._section()

    def _section(self) -> Failures:
        self._sections += 1
        return Failures(
            dist.distributed_c10d._get_default_store(), f"{self._key}/{self._sections}"
        )

    def gather(self, value: Any) -> list[Any]:
        """Returns the value of each rank, in order."""
        try:
            return gather_objects(value, self.size, self.group)
        except RuntimeError as error:
            text = next(iter(str(error).splitlines()), "")
            raise RanksFailedError(
                f"a rank has ended or does not answer: {text}"
            ) from None

    def meet(self) -> None:
        """Waits until all ranks have come here."""
        dist.barrier(group=self.group)

    def agree(self, error: Exception | None, what: str = "") -> None:
        """Raises on all ranks if one has failed.

        Raises:
            ValueError: a rank failed with one.
            RanksFailedError: a rank failed otherwise.
        """
        outcome = (
            None if error is None else (isinstance(error, ValueError), f"{what}{error}")
        )
        outcomes = self.gather(outcome)
        if error is not None:
            raise error
        for rank, outcome in enumerate(outcomes):
            if outcome is not None:
                is_users, text = outcome
                message = f"rank {rank}: {text}"
                raise (
                    ValueError(message)
                    if is_users
                    else RanksFailedError(message, names_rank=True)
                )

    def together(
        self, collectives: Collectives, call: Callable[[], Any]
    ) -> tuple[Any, str]:
        """Runs a call with the user's collectives on all ranks; none waits for a rank with an error.

        Returns:
            The result, and what was raised: by all ranks, who are still in step with each other then.

        Raises:
            RanksFailedError: a rank raised while others waited for it, so that they are not in step any more.
        """
        result = None
        error = ""
        waited = False
        try:
            result = call()
        except Exception as caught:
            # C++ makes another error of OtherRankError
            waited = bool(collectives.failure)
            error = described(caught)
            if not waited:
                self.failures.tell(f"rank {self.rank}: {error}")
        outcomes = self.gather((waited, error))
        # A key of the store cannot be taken back, so each section has its own.
        self.failures = collectives.failures = self._section()
        is_in_step = True
        failed = []
        for rank, (behind, text) in enumerate(outcomes):
            if behind:
                is_in_step = False
            elif text:
                failed.append(f"rank {rank}: {text}")
        # If every rank has raised by itself, or none has, they are still in step with
        # each other.
        if not is_in_step or 0 < len(failed) < self.size:
            raise RanksFailedError(
                "; ".join(failed) or "a rank has ended", names_rank=bool(failed)
            )
        return result, outcomes[0][1]

    def close(self) -> None:
        """Ends the group of its own."""
        dist.destroy_process_group(self.group)


@contextmanager
def agreed(ranks: Ranks | None) -> Iterator[None]:
    """Raises an error of one rank on all of them; None stands for a single process."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        if ranks is None:
            raise
        error = caught
    if ranks is not None:
        ranks.agree(error)
