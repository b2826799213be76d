from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes a file system in memory with this many bytes."""
    mounted: list[Path] = []

    def make(size_bytes: int) -> Path:
        disk = tmp_path / f"disk-{len(mounted)}"
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(disk)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a small disk needs the right to mount a tmpfs: {done.stderr.strip()}")
        mounted.append(disk)
        return disk

    yield make
    for disk in mounted:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
