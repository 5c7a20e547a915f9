"""Negative sampling: uniform, by popularity, hard and mixed, on the host and on a device."""

import torchrec_ext.needs_torch  # noqa: F401
