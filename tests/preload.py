"""What the fork server imports before it forks ranks: all that a training run needs, and what the tests themselves import."""

import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401

import tests.contracts
import tests.examples  # noqa: F401
import torchx_apps.training  # noqa: F401

# Else the first collection of every rank writes to, and so copies, each page of what was imported.
gc.freeze()
