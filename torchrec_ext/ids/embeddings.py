"""DynamicEmbeddings: ids without end for the nn.Embedding of a model in a loop of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_ext.batch import Fresh
from torchrec_ext.ids.dynamic import DynamicIds
from torchrec_ext.ids.index import mixed
from torchrec_ext.ids.look_ups import LookUp, has_look_up, raw_ids
from torchrec_ext.ids.policy import Dynamic
from torchrec_ext.schema.validation import listed


class DynamicEmbeddings:
    """Lets embeddings of a model take any 64-bit ids; the model and its training loop stay as they are.

    In training mode an embedding counts the ids that it is called with, admits and evicts, and begins rows of new ids
    anew, weights and optimizer state, before it reads them. In eval mode it reads, and an id without a row is row 0.
    A step ends with ``optimizer.step()``, so that no row that a step has read is given away within it. Where an
    embedding has ``padding_idx=0``, the id 0 is padding, and reads row 0 as ids without a row do.

    Such a model cannot be copied or saved whole, since the rows of a copy would stay those of ids that have left: load
    the three states into new ones.

    Args:
        model: module that holds the embeddings; on several ranks each has one, and all call it equally often.
        optimizer: the optimizer of their weights, or several.
        tables: settings by path of an ``nn.Embedding`` or ``nn.EmbeddingBag`` in the model; ``capacity`` is its number
            of rows.
        every: steps between two admissions, see :class:`DynamicIds`.

    Attributes:
        ids: the ids of the tables.

    Raises:
        ValueError: a path that is no such module, another capacity, a ``padding_idx`` other than 0, a weight that
            ``optimizer`` does not hold, an optimizer whose state cannot begin anew row by row (Rprop, ASGD, Adafactor,
            LBFGS), or a model that has dynamic ids already. In training: a weight that another optimizer moves.

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
    ) -> None:
        self._optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        self._modules: dict[str, nn.Embedding | nn.EmbeddingBag] = {}
        device = None
        for path, policy in tables.items():
            module = _embedding(model, path, policy, self._optimizers)
            device = module.weight.device
            self._modules[path] = module
        self.ids = DynamicIds(tables, every=every, device=device)
        self._moments = {}
        for path, module in self._modules.items():
            weight = module.weight.detach()
            moments = torch.stack([weight.mean(), weight.std()])
            # Alike on all ranks: DDP may make the weights so only later.
            self._moments[path] = self.ids.ranks.reduced(moments, "MAX").unbind()
        self._is_new_step = True
        # Weights that this step has read, with their versions.
        self._versions: dict[str, tuple[Tensor, int]] = {}
        self._hooks: list[Any] = []
        for path, module in self._modules.items():
            look_up = LookUp(path, self._look_up)
            self._hooks.append(
                module.register_forward_pre_hook(look_up, with_kwargs=True)
            )
        # Several optimizers step one after the other, and the last one ends the step.
        self._step_hook = self._optimizers[-1].register_step_post_hook(self._end_step)

    def remove(self) -> None:
        """Lets the embeddings take rows again."""
        for hook in (*self._hooks, self._step_hook):
            hook.remove()

    def _end_step(self, *_: object) -> None:
        self._is_new_step = True

    def _look_up(self, path: str, ids: Any) -> Tensor:
        """Returns the rows of ids that an embedding is called with, of the same shape.

        Raises:
            ValueError: ids that are no whole numbers, or a weight that another optimizer has moved.
        """
        module = self._modules[path]
        raw = raw_ids(path, module, ids)
        if not module.training:
            return self.ids.rows({path: raw})[path].to(ids.device)
        self._check_versions(path)
        # Several look-ups of one step count as one, so that none of its rows is given
        # away.
        rows, notes = self.ids.step({path: raw}, again=not self._is_new_step)
        self._is_new_step = False
        for note in notes:
            self._begin_rows(note)
        self._versions[path] = _version(module.weight)
        # The model may have moved since.
        return rows[path].to(ids.device)

    def _check_versions(self, path: str) -> None:
        """Raises if a weight has moved within a step; looking up with ``max_norm`` moves it too."""
        if self._is_new_step:
            self._versions = {}
        module = self._modules[path]
        if path not in self._versions or module.max_norm is not None:
            return
        weight, version = self._versions[path]
        if weight is module.weight and _version(weight)[1] != version:
            raise ValueError(
                f"'{path}': its weight has moved, but no step of the optimizer of DynamicEmbeddings has ended; pass it "
                "the optimizers that step, the last one last"
            )

    @torch.no_grad()
    def _begin_rows(self, note: Fresh) -> None:
        if not len(note.rows):
            return
        weight = self._modules[note.table].weight
        rows = note.rows.to(weight.device)
        weight[rows] = self._drawn(note.table, note.ids).to(weight)
        for optimizer in self._optimizers:
            for name, value in optimizer.state.get(weight, {}).items():
                # A number of steps belongs to the whole table.
                if (
                    isinstance(value, Tensor)
                    and value.dim()
                    and len(value) == len(weight)
                ):
                    value[rows] = _first_value(optimizer, name)
        if note.table in self._versions:
            self._versions[note.table] = _version(weight)

    def _drawn(self, path: str, ids: Tensor) -> Tensor:
        """Draws first values, normal with the mean and the deviation that the weights had, alike on every rank."""
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
        raise ValueError(
            f"'{path}' is no nn.Embedding of the model; its embeddings are {listed(embeddings)}"
        )
    module = embeddings[path]
    if has_look_up(module):
        raise ValueError(
            f"'{path}' has dynamic ids already: call remove() of its DynamicEmbeddings first, or build the model anew"
        )
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
    holders = [
        optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for each in group["params"]
        if each is module.weight
    ]
    if not holders:
        raise ValueError(
            f"'{path}': the optimizer does not hold its weight; pass the optimizer that updates it"
        )
    for holder in holders:
        if isinstance(holder, _NOT_BY_ROW):
            raise ValueError(
                f"'{path}': the state of {type(holder).__name__} cannot begin anew row by row; take Adam, AdamW, "
                "Adagrad, SGD or RMSprop for this weight"
            )
    return module


def _first_value(optimizer: torch.optim.Optimizer, name: str) -> float:
    """Returns the number that an optimizer's state begins with; 0 for all of torch's but Adagrad's sum."""
    # torch takes no notice of the setting of a group.
    is_sum = name == "sum"
    return float(is_sum and optimizer.defaults.get("initial_accumulator_value", 0.0))


def _version(weight: Tensor) -> tuple[Tensor, int]:
    """Returns a weight and the number of its changes in place."""
    return weight, weight._version


_KINDS = (nn.Embedding, nn.EmbeddingBag)
_NOT_BY_ROW = (
    torch.optim.Rprop,
    torch.optim.ASGD,
    torch.optim.Adafactor,
    torch.optim.LBFGS,
)
