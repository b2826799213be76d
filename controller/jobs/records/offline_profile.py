"""The offline profile that a job was submitted with, and whether it is of what the job trains."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from atoll.controller.planners import forms
from atoll.controller.planners.fields import fields
from atoll.controller.planners.surrogate import Surrogate
from atoll.errors import BadInput

FINGERPRINT: Final = re.compile(r"[0-9a-f]{64}")
_MAX_WORDS: Final = 500


@dataclass(frozen=True, slots=True)
class OfflineProfile:
    """fingerprint: of what was profiled; empty where the file does not say. words: the same for people."""

    surrogate: Surrogate
    fingerprint: str = ""
    words: str = ""

    def is_of(self, trained: str) -> bool:
        """Whether it may be used for a script that prepared `trained`; empty: not known, so nothing speaks against."""
        return not trained or not self.fingerprint or trained == self.fingerprint


@lru_cache(maxsize=64)
def offline_profile(text: str) -> OfflineProfile:
    """From JSON: a surrogate, and under "model" what it is of. Raises BadInput."""
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"not JSON: {error}. Give the file that `atoll profile` wrote") from error
    model = data.pop("model", None) if isinstance(data, dict) else None
    surrogate = forms.surrogate(data)
    if model is None:
        return OfflineProfile(surrogate)
    known = fields(model, "model", {"fingerprint", "words"})
    fingerprint, words = known["fingerprint"], known["words"]
    if not isinstance(fingerprint, str) or not FINGERPRINT.fullmatch(fingerprint):
        raise BadInput("model.fingerprint must be 64 hexadecimal digits. Give the file that `atoll profile` wrote")
    if not isinstance(words, str) or len(words) > _MAX_WORDS:
        raise BadInput(f"model.words must be a text of at most {_MAX_WORDS} characters")
    return OfflineProfile(surrogate, fingerprint, words)
