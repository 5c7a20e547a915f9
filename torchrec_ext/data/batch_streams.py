"""Batches: rows in memory, from a source or on a device, as one protocol, and which of them a loader's arguments ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Chunk
from torchrec_ext.data.device_candidates import DeviceCandidates
from torchrec_ext.data.loader_config import LoaderConfig
from torchrec_ext.data.memory import MemoryRows
from torchrec_ext.data.mixed_candidates import MixedCandidates
from torchrec_ext.data.pairing import OwnCandidates
from torchrec_ext.data.resident import ResidentRows, read_all
from torchrec_ext.data.row_groups import Source
from torchrec_ext.data.samplers import Sampler
from torchrec_ext.data.share import Share
from torchrec_ext.data.shared_candidates import SharedCandidates
from torchrec_ext.data.streamed import StreamedRows
from torchrec_ext.schema import BatchSchema


class Batches(Protocol):
    """Where a rank's batches come from: :class:`MemoryRows`, :class:`StreamedRows` or :class:`ResidentRows`.

    ``num_rows`` are those of all ranks; ``ahead`` says whether a thread may build batches and whether they are then pinned.
    """

    num_rows: int
    ahead: bool

    def fingerprint(self) -> dict[str, Any]:
        """What the order depends on beside the loader's settings."""

    def batches(self, epoch: int, start: int) -> Iterator[TowerBatch]:
        """Those of an epoch from step ``start`` on, as many on every rank."""


def on_host(
    chunk: Chunk | Source, schema: BatchSchema, config: LoaderConfig, items: Chunk | None, sampler: Sampler | None, share: Share
) -> Batches:
    """The batches of rows in memory or of a source.

    Raises:
        ValueError: a frequency estimate with a source.
    """
    pairing: OwnCandidates | SharedCandidates
    if isinstance(sampler, MixedCandidates) and items is not None:
        pairing = SharedCandidates(schema, config, items, sampler, share)
    elif not isinstance(sampler, MixedCandidates):
        pairing = OwnCandidates(schema, config, items, sampler, share)
    estimator = sampler if isinstance(sampler, MixedCandidates) and sampler.estimates else None
    if isinstance(chunk, Chunk):
        return MemoryRows(chunk, schema, config, pairing, share, estimator)
    if estimator:
        raise ValueError(
            "a frequency estimate with a source of rows: a rank sees its own rows only; give MixedCandidates the counts of the "
            "items, or rows in memory"
        )
    as_they_are = items is None and not config.negatives
    return StreamedRows(chunk, schema, config, items, None if as_they_are else pairing, share)


def on_device(
    chunk: Chunk | Source,
    schema: BatchSchema,
    config: LoaderConfig,
    items: Chunk | None,
    sampler: Sampler | None,
    share: Share,
    device: torch.device,
) -> Batches:
    """The batches of rows that are held on ``device``.

    Raises:
        ValueError: what only the host can do.
    """
    where = f"device={device} with loader."
    if isinstance(sampler, MixedCandidates):
        raise ValueError(f"{where}sampling='mixed': its candidates are drawn on the host; leave device out")
    if config.negatives and items is None:
        raise ValueError(f"{where}negatives={config.negatives} without items: drawn items need features; pass items=")
    ids = ("user_id", "item_id") if config.negatives else ("item_id",) if items is not None else ()
    without = [name for name in items or () if name not in ids]
    rows = chunk if isinstance(chunk, Chunk) else read_all(chunk, schema, config, ids, without)
    candidates = None if items is None else DeviceCandidates(schema, rows, items, sampler, config.negatives, device)
    return ResidentRows(rows, schema, config, candidates, share, device)
