"""topology(): devices that do not exist, for TorchRec's planner."""

from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import (
    HardwareConfig,
    KernelConfig,
    TopologyFactory,
    TrainerConfig,
)

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
