"""What runs of a user's own code: its lines, its state, its files, its ops and their time."""

import torchrec_ext.needs_torch  # noqa: F401
