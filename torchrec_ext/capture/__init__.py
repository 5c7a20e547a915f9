"""Forward, backward and optimizers of a training step as one captured function, and the policy of when to capture."""

import torchrec_ext.needs_torch  # noqa: F401
