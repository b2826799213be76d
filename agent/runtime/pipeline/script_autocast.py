"""torch.autocast of a script around an engine's step: every forward pass gets a region of its own.

torch.autocast caches the casts of weights until its outermost region ends. A script of plain PyTorch enters a region
for one forward pass and its loss; backward pass, update and data loading are outside. An engine makes many passes and
updates inside one region of the script, so it leaves that region for its step, and enters one for each forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from atoll.errors import BadInput


@dataclass(frozen=True, slots=True)
class ScriptAutocast:
    """enabled: whether forward passes run in bfloat16, the only dtype that needs no scaled gradients."""

    device_type: str
    enabled: bool = False

    @classmethod
    def current(cls, device_type: str) -> ScriptAutocast:
        """Return what the calling thread runs under. Raises BadInput for another dtype than bfloat16."""
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        if enabled and dtype != torch.bfloat16:
            raise BadInput(
                f"torch.autocast in {str(dtype).removeprefix('torch.')} needs gradients that are scaled (GradScaler), "
                "which run.prepare_pipeline does not do: small ones would be lost. Use torch.autocast with "
                "dtype=torch.bfloat16"
            )
        return cls(device_type, enabled)

    @contextmanager
    def left(self) -> Iterator[None]:
        """Run an engine's step outside the script's region."""
        with torch.autocast(self.device_type, dtype=torch.bfloat16, enabled=False):
            yield

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run one forward pass and its loss in a region that shares no cast with any other."""
        torch.clear_autocast_cache()
        try:
            with torch.autocast(self.device_type, dtype=torch.bfloat16, enabled=self.enabled):
                yield
        finally:
            torch.clear_autocast_cache()  # torch does so only where no region is around this one
