"""Experiments on a training loop, of one process or of several ranks, and the facts that they measure."""

import torchrec_ext.needs_torch  # noqa: F401
