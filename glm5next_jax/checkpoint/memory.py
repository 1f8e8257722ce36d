"""How much memory is free, asked before weights are read rather than found out half way."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from glm5next_jax.checkpoint.report import human_bytes


def require_free(needed: int, what: str, free: int | None, where: str) -> None:
    """Refuses what cannot fit; does nothing where the free amount is unknown.

    Raises:
      MemoryError: fewer than `needed` bytes are free; the message has both numbers.
    """
    if free is not None and needed > free:
        raise MemoryError(
            f"{what} needs {human_bytes(needed)} ({needed} bytes), but only {human_bytes(free)} "
            f"({free} bytes) are free {where}"
        )


def free_host_bytes() -> int | None:
    """Memory that this process can still get: the system's, or its control group's if less."""
    free = []
    meminfo = pathlib.Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(
            line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line
        )
        if "MemAvailable" in fields:
            free.append(int(fields["MemAvailable"].split()[0]) * 1024)
    group = pathlib.Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        if (group / limit).exists() and (group / used).exists():
            value = (group / limit).read_text().strip()
            if value.isdigit():
                free.append(max(int(value) - int((group / used).read_text()), 0))
    return min(free) if free else None


def require_free_on_devices(needed: Mapping[Any, int], what: str) -> None:
    """Refuses what cannot fit on a device; CPU devices share the host's memory.

    Args:
      needed: bytes per device of this process; None is the default device.
      what: needs them.

    Raises:
      MemoryError: more is needed than is free; the message has both numbers, and the device.
    """
    shared, num_shared = 0, 0
    for device, num_bytes in needed.items():
        device = jax.local_devices()[0] if device is None else device
        if device.platform == "cpu":
            shared += num_bytes
            num_shared += 1
        else:
            require_free(num_bytes, what, *free_device_bytes(device))
    if num_shared:
        count = f", which {num_shared} CPU devices share" if num_shared > 1 else ""
        require_free(shared, what, free_host_bytes(), f"in host memory{count}")


def free_device_bytes(device: Any) -> tuple[int | None, str]:
    """(bytes free on an accelerator, None if unknown; a name for that place)."""
    stats = device.memory_stats()
    place = f"on device {device.id} ({device.device_kind})"
    if not stats or "bytes_limit" not in stats:
        return None, place
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0), place
