"""What a run tells a person: the plan, the figures beside the popularity ranking's, and what one user would be shown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tabulate import tabulate

from torchrec_ext.data.interactions import InteractionData
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.loop import Record
from torchrec_ext.train.run_folder import RunFolder

if TYPE_CHECKING:
    from torchx_apps.training import Recommended

SHOWN = 5


def say_start(data: InteractionData, runtime: Runtime, plan: str) -> None:
    """The data, the ranks and the plan."""
    print(
        f"data: {data.name}, {data.train.num_rows:,} training rows, {data.test.num_rows:,} users with a held-out item, "
        f"{data.num_items:,} items"
    )
    if data.licence:
        print(f"licence: {data.licence}")
    print(f"ranks: {runtime.world_size} on {runtime.device.type} over {runtime.backend}, {runtime.threads} thread(s) each")
    if runtime.oversubscribed:
        print(f"note: {runtime.oversubscribed}")
    print(f"\n{plan}\n", flush=True)


def finish(
    folder: RunFolder,
    data: InteractionData,
    figures: Record,
    popularity: Record,
    recommended: Recommended,
    history: Sequence[Record],
    seconds: float,
    memory: float,
) -> None:
    """Prints the figures and the recommendations, and writes ``summary.json``."""
    records = [record for record in history if record["kind"] == "train"]
    rate = sum(r["rows"] for r in records) / sum(r["rows"] / r["rows_per_s"] for r in records)
    print(f"\n{figures_table(figures, popularity, data.best)}")
    print(
        f"\ntrained in {seconds:.1f} s, evaluations included, at {rate:,.0f} samples/s; the largest rank took {memory:,.0f} MiB\n"
    )
    print(recommendation_text(data, recommended))
    summary = {
        "data": data.name,
        "test": figures,
        "popularity": popularity,
        "best": dict(data.best),
        "seconds": seconds,
        "samples_per_s": rate,
        "peak_memory_mib": memory,
    }
    folder.write("summary.json", json.dumps(summary, indent=2))


def say_end(folder: Path, picture: Path) -> None:
    """Where the run's files are."""
    print(f"\nrun folder: {folder} (picture: {picture.name}; `tensorboard --logdir {folder}` shows the events)", flush=True)


def figures_table(figures: Record, popularity: Record, best: Mapping[str, float]) -> str:
    """Each figure of the held-out test items beside the popularity ranking's, their ratio, and the best possible where known."""
    best = {name.lower(): value for name, value in best.items()}
    rows = []
    for name, value in figures.items():
        base = popularity.get(name)
        row = [name, f"{value:.4f}", f"{base:.4f}" if base else "", f"{value / base:.2f}x" if base else ""]
        rows.append(row + ([f"{best[name]:.4f}" if name in best else ""] if best else []))
    headers = ["test items, whole catalogue", "this model", "popularity", "ratio"] + ["best possible"] * bool(best)
    return str(tabulate(rows, headers=headers, disable_numparse=True))


def recommendation_text(data: InteractionData, recommended: Recommended) -> str:
    """The top titles for one user, with what that user liked before and the item that was held out."""
    titles = data.titles or [f"item {item}" for item in range(data.items.num_rows)]
    liked = data.liked.slice(recommended.user, recommended.user + 1).values[-SHOWN:]
    row = int((data.test["user_id"].values == recommended.user).argmax())
    held_out = int(data.test["item_id"].values[row])
    lines = [f"user {recommended.user} liked before: " + "; ".join(titles[item] for item in liked)]
    lines += [f"{len(recommended.items)} recommendations (the held-out item was: {titles[held_out]}):"]
    for place, (item, score) in enumerate(zip(recommended.items, recommended.scores, strict=True), start=1):
        lines.append(f"{place:3}. {titles[item]}  ({score:.2f}){'   <- the held-out item' if item == held_out else ''}")
    return "\n".join(lines)
