"""Checkpoints that any plan and any number of ranks can load: nothing lost, nothing loaded that is not whole."""

import torchrec_ext.needs_torch  # noqa: F401
