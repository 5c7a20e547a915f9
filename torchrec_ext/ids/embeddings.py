"""DynamicEmbeddings: ids without end for the nn.Embedding of a model in a loop of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrec_ext.batch import Fresh
from torchrec_ext.ids.dynamic import DynamicIds
from torchrec_ext.ids.index import EMPTY, mixed
from torchrec_ext.ids.policy import Dynamic


class DynamicEmbeddings:
    """Lets embeddings of a model take any 64-bit ids; the model and its training loop stay as they are.

    In training mode an embedding counts the ids that it is called with, admits and evicts, and begins rows of new ids
    anew, weights and optimizer state, before it reads them. In eval mode it reads, and an id without a row is row 0.
    A step ends with ``optimizer.step()``, so that no row that a step has read is given away within it. Where an
    embedding has ``padding_idx=0``, the id 0 is padding, and reads row 0 as ids without a row do.

    Args:
        model: module that holds the embeddings; on several ranks each has one, and all call it equally often.
        optimizer: the optimizer of their weights, or several.
        tables: settings by path of an ``nn.Embedding`` or ``nn.EmbeddingBag`` in the model; ``capacity`` is its number
            of rows.
        every: steps between two admissions, see :class:`DynamicIds`.
        group: ranks that share the ids, see :class:`DynamicIds`.
        begin: function from (path, ids (n,)) to the first values (n, D) of fresh rows, alike on every rank. By default
            normal, with the mean and the deviation that the weights have now.

    Attributes:
        ids: the ids of the tables.

    Raises:
        ValueError: a path that is no such module, another capacity, a ``padding_idx`` other than 0, or a weight that
            ``optimizer`` does not hold.

    Example::

        ids = DynamicEmbeddings(model, optimizer, {"item": Dynamic(capacity=50_000)})
        for batch in loader:  # with raw ids
            ...
        torch.save([model.state_dict(), optimizer.state_dict(), ids.state_dict()], "checkpoint.pt")
        for each, state in zip((model, optimizer, ids), torch.load("checkpoint.pt")):  # in a new process
            each.load_state_dict(state)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
        tables: Mapping[str, Dynamic],
        *,
        every: int = 1,
        group: dist.ProcessGroup | None = None,
        begin: Callable[[str, Tensor], Tensor] | None = None,
    ) -> None:
        self._optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        self._modules: dict[str, nn.Embedding | nn.EmbeddingBag] = {}
        for path, policy in tables.items():
            self._modules[path] = _embedding(model, path, policy, self._optimizers)
        self._begin = begin or self._drawn
        self._moments = {
            path: (module.weight.detach().mean(), module.weight.detach().std())
            for path, module in self._modules.items()
        }
        self.ids = DynamicIds(tables, every=every, group=group)
        self._is_new_step = True
        self._hooks: list[Any] = []
        for path, module in self._modules.items():
            self._hooks.append(
                module.register_forward_pre_hook(partial(self._read, path))
            )
        # Several optimizers step one after the other, and the last one ends the step.
        self._step_hook = self._optimizers[-1].register_step_post_hook(self._end_step)

    def remove(self) -> None:
        """Lets the embeddings take rows again."""
        for hook in (*self._hooks, self._step_hook):
            hook.remove()

    def _end_step(self, *_: object) -> None:
        self._is_new_step = True

    def _read(
        self, path: str, module: nn.Module, inputs: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        ids, *rest = inputs
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"'{path}' has dynamic ids, which a compiled model cannot count; compile the rest of it"
            )
        return self.rows(path, ids, is_training=module.training), *rest

    def rows(self, path: str, ids: Tensor, *, is_training: bool) -> Tensor:
        """Returns the rows of ids that an embedding is called with, of the same shape.

        Args:
            path: path of the embedding.
            ids: whole numbers of any shape.
            is_training: whether ids are counted, admitted and evicted, and rows begun anew.

        Raises:
            ValueError: ids that are no whole numbers.
        """
        if not isinstance(ids, Tensor):
            kind = type(ids).__name__
            raise ValueError(
                f"'{path}': ids are a {kind}, must be a tensor; make ids of strings by string_ids()"
            )
        if ids.is_floating_point():
            raise ValueError(
                f"'{path}': ids are {ids.dtype}, must be whole numbers; convert them where they are read"
            )
        # The index is in the host's memory, and rows go back to where the ids are.
        raw = ids.long().cpu()
        if self._modules[path].padding_idx is not None:
            raw = torch.where(raw == 0, EMPTY, raw)
        if not is_training:
            return self.ids.rows({path: raw})[path].to(ids.device)
        # Several look-ups of one step count as one, so that none of its rows is given
        # away.
        rows, notes = self.ids.step({path: raw}, again=not self._is_new_step)
        self._is_new_step = False
        for note in notes:
            self._begin_rows(note)
        return rows[path].to(ids.device)

    @torch.no_grad()
    def _begin_rows(self, note: Fresh) -> None:
        if not len(note.rows):
            return
        weight = self._modules[note.table].weight
        # An adopted step may update rows later: a look at a whole tensor would update
        # all of them first.
        with torch._C.DisableTorchFunctionSubclass():
            rows = note.rows.to(weight.device)
            values = self._begin(note.table, note.ids).to(weight)
            states = []
            for optimizer in self._optimizers:
                for value in optimizer.state.get(weight, {}).values():
                    # A number of steps belongs to the whole table.
                    if (
                        isinstance(value, Tensor)
                        and value.dim()
                        and len(value) == len(weight)
                    ):
                        states.append(value)
        weight[rows] = values
        for state in states:
            state[rows] = 0

    def _drawn(self, path: str, ids: Tensor) -> Tensor:
        mean, deviation = self._moments[path]
        # A generator of its own, so that dropout does not depend on which ids are new.
        generator = torch.Generator().manual_seed(int(mixed(ids).sum()) & (2**63 - 1))
        values = torch.randn(
            len(ids), self._modules[path].embedding_dim, generator=generator
        )
        return values * deviation.cpu() + mean.cpu()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the ids, for ``torch.save`` beside the model's; all ranks call it."""
        return {**self.ids.state_dict(), "moments": self._moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with saved ids; load the model's and the optimizer's state with them."""
        self.ids.load_state_dict(state)
        # Fresh rows go on as those before the save.
        self._moments = dict(state["moments"])
        self._is_new_step = True


def _embedding(
    model: nn.Module,
    path: str,
    policy: Dynamic,
    optimizers: list[torch.optim.Optimizer],
) -> nn.Embedding | nn.EmbeddingBag:
    embeddings = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _KINDS)
    }
    if path not in embeddings:
        paths = ", ".join(list(embeddings)[:5]) or "none"
        raise ValueError(
            f"'{path}' is no nn.Embedding of the model; its embeddings are {paths}"
        )
    module = embeddings[path]
    if module.num_embeddings != policy.capacity:
        raise ValueError(
            f"'{path}': capacity={policy.capacity:,}, but the embedding has {module.num_embeddings:,} rows; give both "
            "one number"
        )
    if module.padding_idx not in (None, 0):
        raise ValueError(
            f"'{path}': padding_idx={module.padding_idx}: must be 0 or None, since row 0 is that of ids without a row"
        )
    for other_path, other in embeddings.items():
        if other is not module and other.weight is module.weight:
            raise ValueError(
                f"'{path}' shares its weight with '{other_path}', whose ids would need the same rows; look both up by "
                "one nn.Embedding"
            )
    held = {
        id(weight)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    if id(module.weight) not in held:
        raise ValueError(
            f"'{path}': the optimizer does not hold its weight; pass the optimizer that updates it"
        )
    return module


_KINDS = (nn.Embedding, nn.EmbeddingBag)
