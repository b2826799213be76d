"""The one exception family. A message names the cause, the value and the next step."""

from __future__ import annotations

from typing import ClassVar

from atoll.errors.exit_codes import PEER_LOST, TIMEOUT


class AtollError(Exception):
    """Base of everything Atoll raises on purpose. `exit_code` is what the `atoll` command ends with."""

    exit_code: ClassVar[int] = 1


class BadInput(AtollError):
    """A job file, plan input, message or argument is wrong; nothing was changed."""

    exit_code = 2


class EnvironmentFailed(BadInput):
    """A job's own environment could not be made. `output`: the end of what was printed meanwhile."""

    def __init__(self, why: str, output: bytes) -> None:
        super().__init__(why)
        self.output = output


class SettingError(BadInput):
    """A setting has a value that cannot work."""

    def __init__(self, name: str, value: object, why: str, next_step: str) -> None:
        super().__init__(f"{name} = {value!r} {why}. {next_step}")
        self.name = name


class ControllerUnreachable(AtollError):
    """No controller answered, or none leads just now."""

    exit_code = 3


class NotAllowed(AtollError):
    """A certificate or token was missing, wrong or of the wrong role."""

    exit_code = 4


class NoFeasiblePlan(AtollError):
    """No plan satisfies the bounds that were given."""

    exit_code = 5


class DeadlineExceeded(AtollError):
    """A wait reached its deadline."""

    exit_code = TIMEOUT


class NotFound(AtollError):
    """No such job, node or file."""

    exit_code = 2


class Conflict(AtollError):
    """The object was changed concurrently, or its state does not allow this."""


class StoreUnavailable(AtollError):
    """etcd did not answer in time. Whoever waits tries again; nothing is lost."""


class LeadershipLost(AtollError):
    """This controller's leader key is gone: it may write nothing any more."""


class CheckpointError(AtollError):
    """A checkpoint could not be written, or what was read is torn, damaged or of another model."""


class PeerLost(AtollError):
    """A collective failed because another worker of the run is gone."""

    exit_code = PEER_LOST


class WeightsDiffer(AtollError):
    """Ranks that must hold the same weights do not."""


class NotFinite(AtollError):
    """A worker's gradients or weights were NaN or infinite again and again."""


class JobFailed(AtollError):
    """The job that was followed ended in failure."""

    exit_code = 1


class JobCancelled(AtollError):
    """The job that was followed was cancelled."""

    exit_code = 6
