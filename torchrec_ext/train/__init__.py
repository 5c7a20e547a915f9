"""The training loop over TorchRec's pipelines, its figures and its run folder."""

import torchrec_ext.needs_torch  # noqa: F401
