"""Imports of the fork server before it forks ranks: all that a training run needs, and what the tests import."""

import contextlib
import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401

import tests.contracts
import tests.examples
import tests.torchlib
import torchx_apps.jobs.exporting
import torchx_apps.jobs.training  # noqa: F401

# What a whole run imports as it goes, three of its five seconds on a small set; pandas
# by pyarrow's first array.
with contextlib.suppress(ImportError):
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401
    import pandas  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401

# Half of a small model's export: the exporter itself, and its table of functions.
tests.torchlib.keep()

# Else the first collection of every rank writes to, and so copies, each page of what
# was imported.
gc.freeze()
