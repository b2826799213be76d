"""The note that goes with a link through the relay: between which workers it is, and to which port. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from atoll.errors import BadInput
from atoll.network.message_limits import JOB_ID, MAX_RANK


@dataclass(frozen=True, slots=True)
class LinkNote:
    job: str
    run: int
    dialler: int
    """The rank that dials."""
    rank: int
    """The rank that is dialled."""
    port: int
    """Port at which the other worker listens on its machine."""
    seal: bool

    def __str__(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def parse(text: str) -> LinkNote:
        """The reverse of str(). Raises BadInput."""
        try:
            note = LinkNote(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise BadInput(f"{text[:200]!r} is no note of a link: {error}") from error
        numbers = (note.run, note.dialler, note.rank, note.port)
        sound = all(type(number) is int for number in numbers) and type(note.seal) is bool and type(note.job) is str
        if not (sound and JOB_ID.fullmatch(note.job) and 0 < note.port < 2**16 and 0 < note.run < 2**40):
            raise BadInput(f"{text[:200]!r} is no note of a link")
        if not (0 <= note.dialler <= MAX_RANK and 0 <= note.rank <= MAX_RANK):
            raise BadInput(f"{text[:200]!r} names a rank beyond {MAX_RANK}")
        return note
