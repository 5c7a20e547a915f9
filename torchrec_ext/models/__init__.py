"""Models made of towers."""

import torchrec_ext.needs_torch  # noqa: F401
