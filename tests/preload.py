"""What the fork server imports before it forks ranks: all that a training run needs."""

import torchx_apps.training  # noqa: F401
