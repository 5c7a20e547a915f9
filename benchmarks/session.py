"""A transformer over sessions of unequal length: packed against padded, and how evenly ranks are loaded.

    python benchmarks/session.py [--only encoder ranks] [--turns 3] [--quick]

256 sessions of 2 to 50 steps, most of them short as in Amazon Beauty (median 4, mean 6.9), 64 wide, 2 layers, forward
and backward, one thread, all sides in turn. The baseline is torch.nn.TransformerEncoder over (B, S, 64) with a mask,
padded to the longest session of the batch, and, as many recipes do, to S = 50. Ours is SessionEncoder with weights of
the same shapes, with a causal mask and without. `fullest of R ranks`: the load of the rank with the most steps
over the mean, as the loader deals sessions out, against neighbours in shuffled order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from harness import Options, Row, command_line, in_turn, row
from torch import Tensor, nn

from torchrec_ext.data.loader.sessions import deal
from torchrec_ext.modules.session_encoder import SessionEncoder

WIDTH, LAYERS, HEADS, HIDDEN, LONGEST, BATCH = 64, 2, 2, 128, 50, 256


def lengths_of(count: int, seed: int) -> np.ndarray:
    """Steps of sessions, lognormal as users' sequences are."""
    rng = np.random.default_rng(seed)
    return np.clip(1 + rng.lognormal(1.25, 0.85, count).astype(np.int64), 2, LONGEST)


def packed(causal: bool, lengths: np.ndarray) -> Callable[[], None]:
    encoder = SessionEncoder(
        WIDTH,
        LONGEST,
        layers=LAYERS,
        heads=HEADS,
        hidden=HIDDEN,
        causal=causal,
        position="none",
    )
    steps = torch.randn(int(lengths.sum()), WIDTH, requires_grad=True)
    sizes = torch.from_numpy(lengths)
    return lambda: encoder(steps, sizes).sum().backward()


def padded(width: int, lengths: np.ndarray) -> Callable[[], None]:
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, HIDDEN, 0.0, batch_first=True, norm_first=True
    )
    encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    steps = torch.randn(len(lengths), width, WIDTH, requires_grad=True)
    mask = torch.ones(width, width).triu(1).bool()
    beyond = torch.arange(width) >= torch.from_numpy(lengths)[:, None]

    def run() -> None:
        output: Tensor = encoder(
            steps, mask=mask, src_key_padding_mask=beyond, is_causal=True
        )
        output[~beyond].sum().backward()

    return run


def imbalance(batch: int, ranks: int, repeats: int = 200) -> tuple[float, float]:
    """Returns the fullest rank's load over the mean, with neighbours in shuffled order and as the loader deals."""
    found = []
    for seed in range(repeats):
        lengths = lengths_of(batch, seed)
        neighbours = np.arange(batch) * ranks // batch
        loads = [
            np.bincount(rank, weights=lengths, minlength=ranks)
            for rank in (neighbours, deal(lengths, ranks))
        ]
        found.append([load.max() / load.mean() for load in loads])
    before, after = np.mean(found, axis=0)
    return float(before), float(after)


def encoder(options: Options) -> Iterator[Row]:
    """Yields the rows of one batch, forward and backward."""
    lengths = lengths_of(32 if options.quick else BATCH, 0)
    longest = int(lengths.max())
    sides = {
        "torch, padded to 50": padded(LONGEST, lengths),
        f"torch, padded to {longest}": padded(longest, lengths),
        "ours, bucketed": packed(True, lengths),
        "ours, bucketed, not causal": packed(False, lengths),
    }
    seconds = in_turn(sides, options.turns, 1 if options.quick else 4)
    times = {
        name: [1e3 * each for each in of_side] for name, of_side in seconds.items()
    }
    size = {"sessions": len(lengths), "steps": int(lengths.sum())}
    for name in sides:
        if name.startswith("ours"):
            fastest = f"torch, padded to {longest}"
            yield row(
                name,
                times[name],
                "ms",
                baseline=times[fastest],
                baseline_by=fastest,
                **size,
            )
    yield row(
        "ours, bucketed, against 50",
        times["ours, bucketed"],
        "ms",
        baseline=times["torch, padded to 50"],
    )


def ranks(options: Options) -> Iterator[Row]:
    """Yields how full the fullest rank is, over the mean: as the loader deals sessions against neighbours in order."""
    for count in (2, 8, 32):
        before, after = imbalance(BATCH, count, 20 if options.quick else 200)
        yield row(
            f"fullest of {count} ranks over the mean",
            after,
            "of the mean",
            baseline=before,
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    command_line(__doc__, {"encoder": encoder, "ranks": ranks}, turns=3)
