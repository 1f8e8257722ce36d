"""How much memory is free, asked before weights are read rather than found out half way."""

from __future__ import annotations

import pathlib

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


def free_device_bytes() -> tuple[int | None, str]:
    """(bytes free where the first device keeps arrays, None if unknown; a name for that place)."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return free_host_bytes(), "in host memory"
    stats = device.memory_stats()
    place = f"on {device.device_kind}"
    if not stats or "bytes_limit" not in stats:
        return None, place
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0), place
