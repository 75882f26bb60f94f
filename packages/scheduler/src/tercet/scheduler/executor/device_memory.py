"""How much memory a device still has to give."""

import os
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int:
    """Bytes that could be allocated now: of the accelerator, or of this machine within this process's cgroup."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return min(_machine(), _cgroup())


def _machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kibibytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kibibytes) * 1024


def _cgroup() -> int:
    """What a container's limit leaves, page cache counted as free; without a limit, no bound."""
    unlimited = 1 << 62
    for limit_name, used_name in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "")):
        try:
            limit = (_CGROUP / limit_name).read_text(encoding="ascii").strip()
            if limit == "max":
                return unlimited
            used_path = _CGROUP / (used_name or "memory/memory.usage_in_bytes")
            stat = dict(
                line.split() for line in (used_path.parent / "memory.stat").read_text(encoding="ascii").splitlines()
            )
            files = sum(int(stat.get(name, 0)) for name in ("inactive_file", "active_file"))
            return max(0, int(limit) - int(used_path.read_text(encoding="ascii")) + files)
        except OSError:
            continue
    return unlimited
