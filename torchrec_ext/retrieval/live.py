"""LiveModel: a model that was trained, as towers with the candidate's last: what is exported, and what an audit compares with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import get_unwrapped_module

from torchrec_ext.batch import TowerBatch
from torchrec_ext.models.session_model import NextItemModel, as_towers
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import Cosine, DotProduct, Reordered
from torchrec_ext.modules.recorded import Made, how_made
from torchrec_ext.modules.session_tower import SessionTower
from torchrec_ext.retrieval.architecture import describe, rebuild
from torchrec_ext.retrieval.blockwise import Metric
from torchrec_ext.retrieval.errors import BundleError
from torchrec_ext.schema import BatchSchema

_ENCODER = "network."  # of a NextItemModel; NextItemTower calls it so too


class LiveModel:
    """A trained TowerModel or NextItemModel, sharded or not.

    Args:
        model: from ``hybrid_parallel``, any DistributedModelParallel, or unsharded.
        candidate: the tower of the candidates; the last where not given.
        also: classes of your own among its towers, or its interaction.

    Raises:
        BundleError: it is of another class, has no tower of the candidates alone, or holds what a bundle cannot name.
    """

    def __init__(self, model: nn.Module, *, candidate: str | None = None, also: Sequence[type[nn.Module]] = ()) -> None:
        unwrapped = get_unwrapped_module(model)
        if not isinstance(unwrapped, TowerModel | NextItemModel):
            raise BundleError(
                f"model: a {type(unwrapped).__name__} cannot be exported; give a TowerModel (two_tower, RetrievalModel, "
                "ContextualNCF, MultiTaskModel) or a NextItemModel, whose towers stand apart"
            )
        self.module: TowerModel | NextItemModel = unwrapped
        made = as_towers(unwrapped) if isinstance(unwrapped, NextItemModel) else unwrapped.made_of
        self._names = list(made)
        _check_sides(made)
        self.candidate = candidate or self._names[-1]
        if self.candidate not in made:
            raise BundleError(f"candidate={self.candidate!r}: is no tower of the model; they are {', '.join(made)}")
        self.names = [*(name for name in made if name != self.candidate), self.candidate]
        self.towers = {name: describe(made[name], also=also) for name in self.names}
        self._order = [self.names.index(name) for name in self._names]
        inner = unwrapped.interaction
        self.metric: Metric = "dot" if isinstance(inner, DotProduct) else "cosine" if isinstance(inner, Cosine) else "top_nn"
        self.interaction = describe(how_made(inner), also=also)
        if self.names != self._names:
            widths = [int(rebuild(self.towers[name], also=also).out_features) for name in self.names]  # type: ignore[arg-type]
            self.interaction = describe(Made(Reordered, {"interaction": inner, "order": self._order, "widths": widths}), also=also)

    @property
    def reordered(self) -> bool:
        """Whether the bundle's interaction takes the towers in another order than the model's."""
        return self.names != self._names

    def schema(self) -> BatchSchema:
        """Of the batches that it takes."""
        return self.module.schema()

    @torch.no_grad()
    def logits(self, batch: TowerBatch) -> Tensor:
        """(B,) of the model as it was trained; where it is sharded, every rank calls it."""
        device = next((value.device for value in self.module.parameters()), torch.device("cpu"))
        batch = batch.to(device)
        if isinstance(self.module, TowerModel):
            return self.module.logits(batch).float().cpu()
        outputs = [self.module.embed(name, batch) for name in ("session", "item")]
        return self.module.interaction(outputs).float().cpu()  # type: ignore[no-any-return]

    def of_tower(self, name: str, dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a tower out of those of the model, by their names in the tower."""
        if isinstance(self.module, NextItemModel):
            return {} if name == self.candidate else {key: value for key, value in dense.items() if key.startswith(_ENCODER)}
        prefix = f"towers.{name}."
        return {key.removeprefix(prefix): value for key, value in dense.items() if key.startswith(prefix)}

    def of_interaction(self, dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Likewise of the interaction."""
        prefix = "interaction."
        inner = "interaction." if self.reordered else ""
        return {inner + key.removeprefix(prefix): value for key, value in dense.items() if key.startswith(prefix)}


def _check_sides(made: Mapping[str, Made]) -> None:
    for name, own in made.items():
        if issubclass(own.kind, SessionTower) and (own.arguments or {}).get("target"):
            raise BundleError(
                f"tower '{name}': the target item is one step of its sequence, so the item has no vector of its own that could be "
                "stored; rank candidates with the model itself, or train a NextItemModel or a SessionTower without a target"
            )
    if len(made) < 2:
        raise BundleError(f"model: has the tower {', '.join(made)} alone; serving needs one of the query and one of the candidates")
