"""What a benchmark ran on."""

import os
import platform
from pathlib import Path
from typing import Any

import torch

from cbgen.device import total_memory_bytes

CPUINFO = Path("/proc/cpuinfo")


def hardware(device: torch.device) -> dict[str, Any]:
    """Names of processor and device, cores, and bytes of memory of the machine or of the container."""
    cpu = _cpu_name()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_bytes": total_memory_bytes(torch.device("cpu")),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
    }


def _cpu_name() -> str:
    lines = CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
