"""What a plan leaves in a folder: its text, its numbers as JSON, and a picture of what each rank holds."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrec_ext.distributed.alternatives import Alternative
from torchrec_ext.distributed.cluster import GB, Cluster
from torchrec_ext.distributed.drafting import Draft
from torchrec_ext.distributed.forecast import RankForecast

_PARTS = {"weights": "#1f5f99", "state": "#b3541e", "buffers": "#6a994e", "dense": "#7b5ea7"}


def as_json(
    batch_size: int, cluster: Cluster, draft: Draft, ranks: Sequence[RankForecast], alternatives: Sequence[Alternative]
) -> dict[str, Any]:
    """The plan in numbers: bytes and milliseconds."""
    return {
        "cluster": dataclasses.asdict(cluster),
        "batch_size": batch_size,
        "tables": [
            {
                "name": option.name,
                "rows": option.tensor.shape[0],
                "dim": option.tensor.shape[1],
                "sharding": option.sharding_type,
                "kernel": option.compute_kernel,
                "ranks": [shard.rank for shard in option.shards],
            }
            for option in draft.options
        ],
        "ranks": [{**dataclasses.asdict(rank), "total": rank.total, "ms": rank.ms} for rank in ranks],
        "alternatives": [{**dataclasses.asdict(one), "ms": None if math.isinf(one.ms) else one.ms} for one in alternatives],
    }


def write(folder: Path, text: str, report: dict[str, Any], ranks: Sequence[RankForecast], cluster: Cluster) -> None:
    """``plan.txt``, ``plan.json`` and ``memory.png``.

    Raises:
        ValueError: the folder cannot be written, or matplotlib is missing.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.txt").write_text(f"{text}\n")
        (folder / "plan.json").write_text(f"{json.dumps(report, indent=2)}\n")
    except OSError as error:
        raise ValueError(f"--out {folder}: cannot be written: {error.strerror or error}; choose another folder") from None
    draw(folder / "memory.png", ranks, cluster)


def draw(path: Path, ranks: Sequence[RankForecast], cluster: Cluster) -> None:
    """What each rank holds on the left, against what it has; the time of its tables on the right."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("the picture needs matplotlib: pip install 'torchrec-ext[report]', or leave --out away") from None
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    memory, time = figure.subplots(1, 2)
    places = [rank.rank for rank in ranks]
    floor = [0.0] * len(ranks)
    for part, color in _PARTS.items():
        heights = [getattr(rank, part) / GB for rank in ranks]
        memory.bar(places, heights, bottom=floor, width=1.0 if len(ranks) > 32 else 0.8, color=color, label=part)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    has = (cluster.device_bytes or cluster.host_bytes) / GB
    if max(floor) > 0.1 * has:  # else the bars would be lines on the ground
        memory.axhline(has, linestyle="--", color="0.3", label="has")
    memory.set(title=f"memory by rank; each has {has:,.1f} GiB", xlabel="rank", ylabel="GiB")
    memory.legend(frameon=False, fontsize="small")
    time.bar(places, [rank.lookup_ms for rank in ranks], color="#1f5f99", label="look-up")
    time.bar(
        places,
        [rank.exchange_ms for rank in ranks],
        bottom=[rank.lookup_ms for rank in ranks],
        color="#b3541e",
        label="exchange",
    )
    time.set(title="tables' part of a step, foreseen", xlabel="rank", ylabel="ms")
    time.legend(frameon=False, fontsize="small")
    for axis in (memory, time):
        axis.grid(alpha=0.25, axis="y")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
