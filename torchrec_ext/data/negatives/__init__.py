"""Negative sampling: uniform and by popularity; the items that users are known to have taken."""

import torchrec_ext.needs_torch  # noqa: F401
