"""Exit codes: of workers, which their agents understand, and of the `atoll` command beside those of its errors."""

from __future__ import annotations

from typing import Final

FINISHED: Final = 0
PEER_LOST: Final = 75
DRAINED: Final = 85
TIMEOUT: Final = 124
INTERRUPTED: Final = 130
