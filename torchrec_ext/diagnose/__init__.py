"""Why is my training slow: experiments on a user's own step, a ranked verdict, and what each change gains."""

import torchrec_ext.needs_torch  # noqa: F401

from torchrec_ext.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
