"""topology(): devices that do not exist, for TorchRec's planner; drafted(): a plan for them."""

import torch
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import (
    HardwareConfig,
    KernelConfig,
    TopologyFactory,
    TrainerConfig,
)

from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.draft import Draft, Request, draft
from torchrec_ext.distributed.runtime import Runtime

GB = 1024**3
_FREE = 0.85  # share of each memory that tables may take


def topology(
    world_size: int, local_world_size: int, *, hbm_gb: float = 80, ssd_gb: float = 0
) -> Topology:
    """GPUs on hosts of 1 TiB; an SSD is a host's, shared by its processes."""
    return TopologyFactory.create_topology(
        TrainerConfig(world_size=world_size, local_world_size=local_world_size),
        HardwareConfig(
            hbm_cap_bytes=int(hbm_gb * GB * _FREE),
            ddr_cap_bytes=int(1024 * GB * _FREE / local_world_size),
            ssd_cap_bytes=int(ssd_gb * GB * _FREE / local_world_size),
            # Bytes per ms.
            intra_host_bw=600 * GB / 1000,
            inter_host_bw=12.5 * GB / 1000,
        ),
        KernelConfig(compute_device="cuda", use_hardware_based_bandwidth=True),
    )


def drafted(
    model: nn.Module,
    devices: Topology,
    config: PlanConfig,
    optimizer: OptimizerConfig,
    batch_size: int,
) -> Draft:
    """A plan for devices that need not exist."""
    runtime = Runtime(
        world_size=devices.world_size,
        local_world_size=devices.local_world_size,
        device=torch.device(devices.compute_device),
    )
    request = Request.of(model, runtime, config, optimizer, {})
    return draft(model, request, devices, batch_size)
