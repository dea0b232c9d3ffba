"""GPUs as cuDNN is told of them in a device's place, by figures of their public data sheets.

What steers cuDNN's choice is the compute capability, the number of SMs, shared memory, cache, memory and clocks.
"""

import json
from typing import NamedTuple

KIB, MIB, GB = 1 << 10, 1 << 20, 10**9


class Gpu(NamedTuple):
    """One GPU: compute capability without its dot, SMs, KiB and MiB on the chip, memory in GB, clocks in MHz."""

    name: str
    sm: int
    sms: int
    memory: float
    l2: int  # MiB
    shared: int  # KiB that a block may opt in to
    threads: int  # of an SM
    blocks: int  # of an SM
    clock: int
    memory_clock: int
    bus: int  # bits

    def __str__(self) -> str:
        return self.name

    def properties(self) -> str:
        """Return the JSON text that `cudnn.create_device_properties` takes."""
        return json.dumps(
            {
                "deviceName": f"NVIDIA {self.name}",
                "deviceVer": self.sm * 10,
                "driverVer": 13020,
                "cudaDeviceId": 0,
                "pciDeviceId": 0,
                "isTccDriver": 0,
                "multiProcessorCount": self.sms,
                "totalGlobalMem": int(self.memory * GB),
                "l2CacheSize": self.l2 * MIB,
                "maxSharedMemoryPerBlock": 48 * KIB,
                "maxSharedMemoryPerBlockOptin": self.shared * KIB,
                "reservedSharedMemoryPerBlock": KIB,
                "maxThreadsPerBlock": 1024,
                "maxThreadsPerSM": self.threads,
                "maxCtasPerSM": self.blocks,
                "regsPerBlock": 65536,
                "maxRegistersPerSM": 65536,
                "maxBlockSize": [1024, 1024, 64],
                "maxGridSize": [2**31 - 1, 65535, 65535],
                "smClockRateKHz": self.clock * 1000,
                "memClockRateKHz": self.memory_clock * 1000,
                "memoryBusWidth": self.bus,
                "supportCoopLaunch": 1,
                "warpSize": 32,
            }
        )


GPUS = (
    Gpu("A100", 80, 108, 85, 40, 163, 2048, 32, 1410, 1593, 5120),
    Gpu("L40S", 89, 142, 47.7, 96, 99, 1536, 24, 2520, 9001, 384),
    Gpu("H100", 90, 132, 85, 50, 227, 2048, 32, 1980, 2619, 5120),
    Gpu("H200", 90, 132, 150, 60, 227, 2048, 32, 1980, 3201, 6144),
    Gpu("B200", 100, 148, 191, 126, 227, 2048, 32, 1965, 3996, 8192),
    Gpu("B300", 103, 148, 288, 126, 227, 2048, 32, 1920, 3996, 8192),
    Gpu("RTX PRO 6000", 120, 188, 101.9, 128, 99, 1536, 24, 2430, 12481, 512),
    Gpu("RTX 5090", 120, 170, 33.7, 96, 99, 1536, 24, 2407, 14001, 512),
    Gpu("GB10", 121, 48, 128, 24, 99, 1536, 24, 2418, 8533, 256),
)
