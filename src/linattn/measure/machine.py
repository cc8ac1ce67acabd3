"""What a figure was measured on."""

import platform
from importlib import metadata

import torch

from ..engines import describe


def machine() -> dict[str, object]:
    """Versions, processor, threads and engines, for the head of a report."""
    return {
        "linattn": metadata.version("linattn"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "engines": describe(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        return names[0] if names else platform.processor()
    except OSError:
        return platform.processor() or "unknown"
