"""How much memory may still be taken, by this machine's count and by the control group's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

HEADROOM: Final = 256 << 20
"""Bytes that are left to everybody else."""


def available(root: Path = Path("/")) -> tuple[int, str]:
    """Return how many bytes can be taken without swapping or being killed, and what sets that limit."""
    limits = [(free, f"control group {group}") for group, free in _groups(root)]
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        limits.append((int(line.split()[1]) * 1024, "this machine"))
    return min(limits, default=(1 << 62, "nothing"))


def _groups(root: Path) -> Iterator[tuple[str, int]]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            tops = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            tops = [root / "sys/fs/cgroup/memory"]
        else:
            continue
        for top in tops:
            folder = top / path.lstrip("/")
            # In a container the path may be the host's while the folder has the container's own group at its top.
            for group in (folder, *folder.parents):
                if (free := _free(group, *names)) is not None:
                    yield f"/{group.relative_to(root)}", free
                if group == top:
                    break


def _free(group: Path, limit: str, used: str, cached: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        most = int((group / limit).read_text())  # "max" is a ValueError: no limit
        taken = int((group / used).read_text())
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == cached:
                taken -= int(value)
        return max(0, most - taken)
    return None
