"""A transformer over sessions of unequal length: packed against padded.

    python benchmarks/session.py [--turns 3] [--quick]

256 sessions of 2 to 50 steps, most of them short as in Amazon Beauty (median 4, mean 6.9), 64 wide, 2 layers, forward
and backward, one thread, all sides in turn. The baseline is torch.nn.TransformerEncoder over (B, S, 64) with a mask,
padded to the longest session of the batch. Ours is SessionEncoder with weights of the same shapes, with a causal mask
and without.
"""

from __future__ import annotations

import numpy as np
import torch
from harness import command_line, in_turn, milliseconds, row
from torch import nn

from torchrec_ext.modules.session_encoder import SessionEncoder

WIDTH, LAYERS, HEADS, HIDDEN, LONGEST, BATCH = 64, 2, 2, 128, 50, 256


def lengths_of(count, seed):
    """Steps of sessions, lognormal as users' sequences are."""
    rng = np.random.default_rng(seed)
    return np.clip(1 + rng.lognormal(1.25, 0.85, count).astype(np.int64), 2, LONGEST)


def packed(causal, lengths):
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


def padded(width, lengths):
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, HIDDEN, 0.0, batch_first=True, norm_first=True
    )
    encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    steps = torch.randn(len(lengths), width, WIDTH, requires_grad=True)
    mask = torch.ones(width, width).triu(1).bool()
    beyond = torch.arange(width) >= torch.from_numpy(lengths)[:, None]

    def run():
        output = encoder(steps, mask=mask, src_key_padding_mask=beyond, is_causal=True)
        output[~beyond].sum().backward()

    return run


def encoder(options):
    """Yields the rows of one batch, forward and backward."""
    lengths = lengths_of(32 if options.quick else BATCH, 0)
    sides = {
        "torch": padded(int(lengths.max()), lengths),
        "ours, bucketed": packed(True, lengths),
        "ours, bucketed, not causal": packed(False, lengths),
    }
    seconds = in_turn(sides, options.turns, 1 if options.quick else 4)
    baseline = milliseconds(seconds.pop("torch"))
    for name, ours in seconds.items():
        yield row(name, milliseconds(ours), "ms", baseline=baseline)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    command_line(__doc__, {"encoder": encoder})
