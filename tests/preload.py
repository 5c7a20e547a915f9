"""What the fork server imports before it forks ranks."""

import torchrec  # noqa: F401

import torchrec_ext.distributed.parallel
import torchrec_ext.models.tower_model
import torchrec_ext.train.pipelines
import torchx_apps.training  # noqa: F401
