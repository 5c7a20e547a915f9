"""Cluster: the devices that a plan is made for, whether they exist or not. This module imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from torchrec_ext.schema.validation import check_choice, check_least

if TYPE_CHECKING:
    from torchrec.distributed.planner import Topology

GB = 1024**3
DeviceType = Literal["cuda", "cpu"]
_MOST_DEVICES = 16_384


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster of ``world_size`` equal devices on equal hosts.

    Args:
        world_size: R, processes of the job, one for each device.
        local_world_size: processes of one host.
        device: ``cuda`` or ``cpu``.
        hbm_gb: memory of a GPU, GiB; not read for ``cpu``.
        ddr_gb: memory of a host, GiB, shared by its processes; holds the tables on ``cpu``, and may hold tables that
            are too large for the GPUs. 0 beside GPUs: no table may leave them.
        ssd_gb: SSD of a host, GiB, shared by its processes; holds tables of the kernel ``key_value``. 0: there is none.
        intra_gb_s: GiB/s that a device sends to devices of its own host.
        inter_gb_s: GiB/s that a device sends to devices of other hosts.
        memory_gb_s: GiB/s at which a device reads the memory where tables live; 0 for what TorchRec assumes.
        reserve: share of each memory kept for dense layers, activations and buffers, 0 to 1.

    Raises:
        ValueError: a number is impossible for a cluster.
    """

    world_size: int
    local_world_size: int
    device: DeviceType = "cuda"
    hbm_gb: float = 80.0
    ddr_gb: float = 1024.0
    ssd_gb: float = 0.0
    intra_gb_s: float = 600.0
    inter_gb_s: float = 12.5
    memory_gb_s: float = 0.0
    reserve: float = 0.15

    def __post_init__(self) -> None:
        check_choice("device", self.device, get_args(DeviceType))
        check_least("world_size", self.world_size)
        check_least("local_world_size", self.local_world_size)
        if self.world_size > _MOST_DEVICES:
            raise ValueError(
                f"world_size={self.world_size}: must be {_MOST_DEVICES:,} or less; the planner weighs each device by "
                "itself, which takes some 25 s for every 1,000"
            )
        if self.world_size % self.local_world_size:
            raise ValueError(
                f"world_size={self.world_size} with local_world_size={self.local_world_size}: every host has as many "
                "devices, so the one must be a multiple of the other"
            )
        # Tables must have some memory to lie in: a GPU's, or a CPU's host's.
        home = "hbm_gb" if self.device == "cuda" else "ddr_gb"
        for name in (
            "hbm_gb",
            "ddr_gb",
            "ssd_gb",
            "intra_gb_s",
            "inter_gb_s",
            "memory_gb_s",
        ):
            value = getattr(self, name)
            least = "at least"
            is_possible = value >= 0
            if name in (home, "intra_gb_s", "inter_gb_s"):
                least = "greater than"
                is_possible = value > 0
            if not (math.isfinite(value) and is_possible):
                raise ValueError(f"{name}={value}: must be a number {least} 0")
        if not 0 <= self.reserve < 1:
            raise ValueError(f"reserve={self.reserve}: must be at least 0 and below 1")

    @property
    def device_bytes(self) -> int:
        """Bytes of a GPU for tables, their state and exchange buffers; 0 for ``cpu``."""
        if self.device == "cpu":
            return 0
        return int(self.hbm_gb * GB * (1 - self.reserve))

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for the tables of each process, their state and exchange buffers."""
        return int(self.ddr_gb * GB * (1 - self.reserve) / self.local_world_size)

    @property
    def ssd_bytes(self) -> int:
        """Bytes of a host's SSD for the tables of each of its processes and their state."""
        return int(self.ssd_gb * GB * (1 - self.reserve) / self.local_world_size)

    def topology(self) -> Topology:
        """Builds the topology for TorchRec's planner, without the reserve."""
        from torchrec.distributed.planner.types import (
            HardwareConfig,
            KernelConfig,
            TopologyFactory,
            TrainerConfig,
        )

        # TorchRec expects bytes per ms.
        hbm_bytes: int | None = None
        hbm_rate = None
        ddr_rate = self.memory_gb_s * GB / 1000 or None
        if self.device == "cuda":
            hbm_bytes = self.device_bytes
            hbm_rate = ddr_rate
            ddr_rate = None
        return TopologyFactory.create_topology(
            TrainerConfig(
                world_size=self.world_size, local_world_size=self.local_world_size
            ),
            HardwareConfig(
                hbm_cap_bytes=hbm_bytes,
                ddr_cap_bytes=self.host_bytes,
                ssd_cap_bytes=self.ssd_bytes,
                intra_host_bw=self.intra_gb_s * GB / 1000,
                inter_host_bw=self.inter_gb_s * GB / 1000,
                hbm_mem_bw=hbm_rate,
                ddr_mem_bw=ddr_rate,
            ),
            KernelConfig(compute_device=self.device, use_hardware_based_bandwidth=True),
        )
