"""Huge pages, as /proc/self/smaps tells of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from atoll.kernels.pages import HUGE_PAGE_BYTES, use_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ENTRIES = 2**24  # 64 MiB


def huge_bytes(address: int) -> int:
    """Of the mapping that holds the address."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(match[1], 16) <= address < int(match[2], 16)
        elif found and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.mark.skipif(not SETTING.exists() or "[never]" in SETTING.read_text(), reason="this kernel has no huge pages")
@pytest.mark.parametrize("written_before", [False, True])
def test_a_large_tensor_gets_huge_pages_and_keeps_what_it_holds(written_before: bool) -> None:
    x = torch.full((ENTRIES,), 3.0) if written_before else torch.empty(ENTRIES)
    middle = x.data_ptr() + 2 * ENTRIES
    assert use_huge_pages(x)
    if not written_before:
        x.fill_(3.0)
    assert x.eq(3.0).all()
    assert huge_bytes(middle) > 0


def test_what_is_smaller_than_a_huge_page_is_left_alone() -> None:
    assert not use_huge_pages(torch.zeros(HUGE_PAGE_BYTES // 4 - 1))
    assert not use_huge_pages(torch.zeros(0))
