"""Negative sampling: uniform, by popularity and mixed; the items that users are known to have taken."""

import torchrec_ext.needs_torch  # noqa: F401
