"""Loaders: from rows in memory, in files or on a device to batches, resumable at any step."""

import torchrec_ext.needs_torch  # noqa: F401
