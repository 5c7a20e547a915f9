"""HTTP server over a Scorer: Starlette under uvicorn, workers on one memory-mapped bundle. Needs the extra `serve`."""

import torchrec_ext.needs_torch  # noqa: F401
