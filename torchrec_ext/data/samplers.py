"""The sampler that a LoaderConfig asks for, and whether a sampler fits a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torchrec_ext.data.hard_negatives import HardNegatives
from torchrec_ext.data.interactions import InteractionData, Pairs
from torchrec_ext.data.loader_config import LoaderConfig
from torchrec_ext.data.mixed_candidates import MixedCandidates
from torchrec_ext.data.mixed_negatives import MixedNegatives
from torchrec_ext.data.negatives import Negatives, PopularityNegatives, UniformNegatives

Sampler = Negatives | MixedCandidates


@runtime_checkable
class Stateful(Protocol):
    """A sampler whose draws depend on more than seed, epoch and row."""

    def state_dict(self, epoch: int) -> dict[str, Any]:
        """What the draws of ``epoch`` depend on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draws as when ``state`` was taken."""


def training_negatives(data: InteractionData, config: LoaderConfig, *, avoid: Pairs | None = None) -> Sampler | None:
    """The sampler that ``config`` asks for, which avoids the training pairs; None for ``negatives=0`` unless it is ``mixed``.

    Held-out pairs may be drawn in training: to avoid them would tell the model which they are. Candidates of ``mixed`` avoid
    nothing: ``is_known`` of :func:`in_batch_negatives` excludes a user's own.

    Args:
        data: the set.
        config: the loader's.
        avoid: the pairs to reject, the training pairs where not given.
    """
    pairs = avoid or data.known
    if config.sampling == "mixed":
        mixed = MixedNegatives(data.num_items, config.shared_negatives, config.batch_size, config.seed)
        return MixedCandidates(mixed, data.popularity()[: data.num_items + 1] if config.frequency == "counted" else None)
    if not config.negatives:
        return None
    if config.sampling == "popularity":
        return PopularityNegatives(data.num_items, pairs.users, pairs.items, config.seed, exponent=config.popularity_exponent)
    uniform = UniformNegatives(data.num_items, pairs.users, pairs.items, config.seed)
    return HardNegatives(uniform, k=config.hard_k, share=config.hard_share) if config.sampling == "hard" else uniform


def check_sampler(config: LoaderConfig, sampler: Sampler | None, *, has_items: bool) -> None:
    """Refuses a sampler that is not the one ``config`` speaks of.

    Raises:
        ValueError: there is none where one is needed, or one of the other kind.
    """
    mixed = config.sampling == "mixed"
    asked = f"loader.shared_negatives={config.shared_negatives}" if mixed else f"loader.negatives={config.negatives}"
    if sampler is None and (mixed or config.negatives):
        raise ValueError(f"{asked}, but no sampler was given; pass negatives=, or set it to 0")
    if sampler is not None and isinstance(sampler, MixedCandidates) != mixed:
        needed = "MixedCandidates" if mixed else "a sampler with draw(users, positions, epoch, n)"
        raise ValueError(f"loader.sampling={config.sampling!r} with negatives={type(sampler).__name__}: must be {needed}")
    if mixed and not has_items:
        raise ValueError("loader.sampling='mixed' without items: the features of extra candidates are looked up there; pass items=")
    if isinstance(sampler, MixedCandidates):
        given = (sampler.mixed.extra, sampler.mixed.batch_size)
        if given != (config.shared_negatives, config.batch_size):
            raise ValueError(
                f"MixedNegatives(extra={given[0]}, batch_size={given[1]}) with loader.shared_negatives={config.shared_negatives} "
                f"and loader.batch_size={config.batch_size}: log_q would be that of other batches; give both the same"
            )
