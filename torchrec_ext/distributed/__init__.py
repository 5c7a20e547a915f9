"""Sharding, placement and runtime for any module that holds TorchRec collections."""

import torchrec_ext.needs_torch  # noqa: F401
