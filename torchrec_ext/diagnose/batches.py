"""BatchSource: batches without an end, and how long each took; joined_batches(): batches made larger."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from time import thread_time
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from torchrec_ext.diagnose.findings import LoaderFacts


class BatchSource:
    """Batches without an end: the iterable begins anew when it ends."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches
        self._iterable = batches
        if isinstance(batches, DataLoader) and batches.persistent_workers:
            # Its workers may be in the middle of the user's epoch: a copy has workers of its own.
            self._iterable = fresh_loader(batches)
        self._iterator = iter(self._iterable)
        # An object of a class may begin anew in its __iter__, a generator never does.
        if type(batches).__module__ in ("builtins", "itertools") and (
            self._iterator is batches
        ):
            raise ValueError(
                f"batches: a {type(batches).__name__} cannot be begun anew, and what it gives to experiments would be "
                "gone; give what makes it, such as a DataLoader, or a list of some hundred batches"
            )
        try:
            self._ahead = [next(self._iterator)]
        except StopIteration:
            raise ValueError(
                f"batches: {type(batches).__name__} gives no batch; give at least one"
            ) from None

    @property
    def first(self) -> Any:
        """The first batch, before it is taken."""
        return self._ahead[0]

    def take(self, clock: Callable[[], float]) -> tuple[Any, float, float]:
        """Returns a batch, its seconds, and the seconds of these without computing in this thread."""
        if self._ahead:
            return self._ahead.pop(), 0.0, 0.0
        start = clock()
        computed = thread_time()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._iterator = iter(self._iterable)
            start = clock()
            computed = thread_time()
            # A loader may warn that a pass repeats the order of the one before, which
            # matters to a training alone.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                batch = next(self._iterator, None)
            if batch is None:
                raise ValueError(
                    "batches: they ended, and iter() does not begin them anew; give an iterable that does, such as a "
                    "DataLoader"
                ) from None
        # The thread's own time leaves out sleeps and reads, which the clock counts.
        computed = thread_time() - computed
        seconds = clock() - start
        return batch, seconds, max(0.0, seconds - computed)

    def close(self) -> None:
        """Ends the current epoch with its loader threads."""
        # A loader may be its own iterator, and goes on with its user.
        if self._iterator is not self.batches and hasattr(self._iterator, "close"):
            self._iterator.close()

    def in_this_process(self) -> BatchSource:
        """Returns the batches of a DataLoader with workers, made without them."""
        return BatchSource(fresh_loader(self.batches, num_workers=0, timeout=0))

    def facts(self, clock: Callable[[], float]) -> LoaderFacts:
        """Describes the loader; if it reads a Dataset row by row, times the rows of a batch."""
        loader = self.batches
        if not isinstance(loader, DataLoader):
            return LoaderFacts(dataset=type(loader).__name__)
        name = type(loader.dataset).__name__
        is_stream = isinstance(loader.dataset, IterableDataset)
        by_row = not is_stream and loader.batch_sampler is not None
        if not by_row or hasattr(loader.dataset, "__getitems__"):
            return LoaderFacts(dataset=name)
        rows = list(next(iter(loader.batch_sampler)))  # type: ignore[arg-type]
        start = clock()
        samples = [loader.dataset[row] for row in rows]
        middle = clock()
        loader.collate_fn(samples)
        end = clock()
        return LoaderFacts(
            dataset=name,
            row_calls=len(rows),
            row_s=(middle - start) / max(1, len(rows)),
            collate_s=end - middle,
        )


def fresh_loader(loader: Any, **settings: Any) -> Any:
    """Returns a DataLoader with the same Dataset, sampler and other settings, but no running workers of its own."""
    changed = copy.copy(loader)
    # Past __setattr__, by which a DataLoader refuses to change its settings.
    vars(changed).update({**settings, "persistent_workers": False, "_iterator": None})
    return changed


def called_with(fn: Callable[..., object], batch: Any) -> Callable[[Any], object]:
    """Returns a function of a whole batch: ``fn`` is called with the entries of a tuple or list if it takes these."""
    # A named tuple is one thing: whoever names the entries of a batch reads them by
    # name.
    if not isinstance(batch, tuple | list) or hasattr(batch, "_fields"):
        return fn
    try:
        inspect.signature(fn).bind(*batch)
    except TypeError:
        return fn
    except ValueError:
        # A function in C may have no signature: it is tried with the entries.
        pass
    return lambda entries: fn(*entries)


def _is_leaf(value: Any) -> bool:
    # TorchRec registers its own types with pytree: their tensors are not of B rows.
    return not isinstance(value, dict | list | tuple)


def row_count(batch: Any) -> int:
    """Returns the rows of a batch, B; 0 unless it consists of tensors (B, ...)."""
    sizes = set()
    for leaf in pytree.tree_leaves(batch, _is_leaf):
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return 0
        sizes.add(len(leaf))
    return sizes.pop() if len(sizes) == 1 else 0


def joined_batches(batches: Sequence[Any]) -> Any:
    """Returns the rows of several batches as one batch."""
    first, *rest = batches

    def join(*tensors: Tensor) -> Tensor:
        return torch.cat(tensors)

    return pytree.tree_map(join, first, *rest, is_leaf=_is_leaf)
