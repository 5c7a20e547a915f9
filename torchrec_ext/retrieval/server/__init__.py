"""The HTTP service over a Scorer: Starlette under uvicorn, several workers on one memory-mapped bundle. Needs the extra `serve`."""

import torchrec_ext.needs_torch  # noqa: F401
