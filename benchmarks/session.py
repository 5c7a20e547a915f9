"""A transformer over sessions of unequal length: packed against padded, and how evenly ranks are loaded.

    python benchmarks/session.py [--repeats 9] [--batch 256] [--cpu_seconds]

Sessions of 2 to 50 steps, most of them short as in Amazon Beauty (median 4, mean 6.9), 64 wide, 2 layers, forward and
backward, one thread, all sides in turn, medians over the repeats; `--cpu_seconds` counts the thread's own seconds, for
a machine that others use. The baseline is torch.nn.TransformerEncoder over (B, S, 64) with a mask, padded to the
longest session of the batch, and, as many recipes do, to S = 50. Ours is SessionEncoder with the same weights' shapes,
by each of its ways to compute attention; `nested` runs without a causal mask, for which torch has no kernel on a CPU,
as does its own `bucketed, not causal`. Last line: one JSON object.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from torchrec_ext.data.loader.sessions import deal
from torchrec_ext.modules.session_encoder import SessionEncoder

WIDTH, LAYERS, HEADS, HIDDEN, LONGEST = 64, 2, 2, 128, 50


def lengths_of(count: int, seed: int) -> np.ndarray:
    """Steps of sessions, lognormal as users' sequences are."""
    rng = np.random.default_rng(seed)
    return np.clip(1 + rng.lognormal(1.25, 0.85, count).astype(np.int64), 2, LONGEST)


def packed(attention: str, causal: bool, lengths: np.ndarray) -> Callable[[], None]:
    encoder = SessionEncoder(
        WIDTH, LONGEST, layers=LAYERS, heads=HEADS, hidden=HIDDEN, causal=causal, attention=attention, position="none"
    )
    steps, sizes = torch.randn(int(lengths.sum()), WIDTH, requires_grad=True), torch.from_numpy(lengths)
    return lambda: encoder(steps, sizes).sum().backward()


def padded(width: int, lengths: np.ndarray) -> Callable[[], None]:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    steps = torch.randn(len(lengths), width, WIDTH, requires_grad=True)
    mask = torch.ones(width, width).triu(1).bool()
    beyond = torch.arange(width) >= torch.from_numpy(lengths)[:, None]

    def run() -> None:
        output: Tensor = encoder(steps, mask=mask, src_key_padding_mask=beyond, is_causal=True)
        output[~beyond].sum().backward()

    return run


def medians(sides: dict[str, Callable[[], None]], repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds of each side, all run in turn."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, run in sides.items():
            start = clock()
            run()
            if repeat:  # the first one warms up
                times[name].append(clock() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def imbalance(batch: int, ranks: int, repeats: int = 200) -> tuple[float, float]:
    """Returns the fullest rank's load over the mean, with neighbours in shuffled order and as the loader deals."""
    found = []
    for seed in range(repeats):
        lengths = lengths_of(batch, seed)
        neighbours = np.arange(batch) * ranks // batch
        loads = [np.bincount(rank, weights=lengths, minlength=ranks) for rank in (neighbours, deal(lengths, ranks))]
        found.append([load.max() / load.mean() for load in loads])
    before, after = np.mean(found, axis=0)
    return float(before), float(after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--cpu_seconds", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lengths = lengths_of(options.batch, 0)
    longest = int(lengths.max())
    print(f"{len(lengths)} sessions, {lengths.sum()} steps, median {np.median(lengths):.0f}, longest {longest}")
    sides = {
        "torch, padded to 50": padded(LONGEST, lengths),
        f"torch, padded to {longest}": padded(longest, lengths),
        "ours, attention padded": packed("padded", True, lengths),
        "ours, bucketed": packed("bucketed", True, lengths),
        "ours, bucketed, not causal": packed("bucketed", False, lengths),
        "ours, nested, not causal": packed("nested", False, lengths),
    }
    seconds = medians(sides, options.repeats, time.thread_time if options.cpu_seconds else time.perf_counter)
    ours = seconds["ours, bucketed"]
    rows = [
        {"name": name, "ms": round(1e3 * took, 2), "ratio": round(took / ours, 2)} for name, took in seconds.items()
    ]
    for ranks in (2, 8, 32):
        before, after = imbalance(options.batch, ranks)
        rows.append(
            {
                "name": f"fullest of {ranks} ranks over the mean",
                "neighbours": round(before, 3),
                "dealt": round(after, 3),
            }
        )
    for row in rows:
        print("  ".join(f"{key} {value}" if key != "name" else f"{value:34}" for key, value in row.items()))
    versions = {name: importlib.metadata.version(name) for name in ("torch", "torchrec", "torchrec-ext")}
    cores = len(os.sched_getaffinity(0))
    print(json.dumps({"benchmark": "session", "versions": versions, "cores": cores, "rows": rows}))


if __name__ == "__main__":
    main()
