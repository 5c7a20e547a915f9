"""Unsharded building blocks: towers, interactions, losses."""

import torchrec_ext.needs_torch  # noqa: F401
