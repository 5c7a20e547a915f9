"""What was trained is what is served: certified bundles, stored embeddings, indexes, and the scorer over them."""

import torchrec_ext.needs_torch  # noqa: F401
