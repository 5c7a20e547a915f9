"""settle_buckets(): gradients are summed in one order from the first step on, so that a resumed run rounds as one that went on.

DistributedDataParallel lays its buckets out anew after its first backward, in the order in which the gradients came. How a sum over
three ranks or more is rounded depends on a number's place in its bucket: gloo and NCCL reduce in rings, and each part of a bucket
begins at another rank. Without this, the first step after a resume differs by a rounding from the same step of a run that went on.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def settle_buckets(model: nn.Module) -> None:
    """Has every DistributedDataParallel in ``model`` keep its first layout; all ranks call it before the first step.

    Two ranks need none of it: a sum of two numbers is rounded in one way. Nor is it done where gradients fill several buckets (over
    1 MiB): there the layout by arrival is what lets the sums overlap with the backward.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and module.process_group.size() > 2:
            parameters = [parameter for parameter in module._module_parameters if parameter.requires_grad]
            if sum(parameter.numel() * parameter.element_size() for parameter in parameters) <= dist._DEFAULT_FIRST_BUCKET_BYTES:
                module.reducer._push_all_rebuilt_params()
