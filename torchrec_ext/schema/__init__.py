"""The columns of a batch, derived from the tables that will read them, and the one place to check ids.

Axis letters, one legend for the whole package: B batch, Q shared rows, F features, L bag length, D embedding dim, T
towers or tasks, N negatives or candidates, K retrieved, R ranks, S session length.
"""

from torchrec_ext.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__, without_torch={"validation"})
