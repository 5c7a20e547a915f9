"""Rows on disk to batches in memory."""

import torchrec_ext.needs_torch  # noqa: F401
