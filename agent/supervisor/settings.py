"""Settings of an agent."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

from atoll.agent.supervisor.owner import OwnersLimits
from atoll.errors import BadInput, SettingError
from atoll.network.message_limits import MAX_SHARERS, NODE_NAME
from atoll.network.rpc import Tls, split_address
from atoll.telemetry.prometheus import check_address


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    controllers: tuple[str, ...]
    """HOST:PORT of each controller. One of them leads; the agent finds out which."""

    name: str = field(default_factory=socket.gethostname)
    """Name of this node, unique in the cluster."""

    island: str = ""
    """The group of nodes with a fast network between them that this one belongs to. Empty: it is measured."""

    rack: str = ""
    """Failure domain inside the island: replicas of a state go to different racks if there are several."""

    address: str | None = None
    """IP address where other nodes reach this one. None: that of the route to the controller."""

    state_dir: Path
    """Logs, unpacked code and process ids, across restarts. One agent at a time."""

    jobs_dir: Path | None = None
    """Checkpoints of jobs that name no directory of their own go to jobs_dir/JOB. None: state_dir/jobs."""

    tls: Tls | None = None
    volunteer: bool = False
    """A volunteer may vanish at any moment: it is no part of a run, and helps jobs whose strategy accepts help."""

    owner: OwnersLimits = field(default_factory=OwnersLimits)
    """Conditions under which a volunteer helps."""

    uplink_bps: float | None = None
    """Limit on the rate of a volunteer's answers, in bits per second. None: unlimited."""

    behind_nat: bool = False
    """True if no other island can dial this node: its workers then reach other islands through the relay."""

    token: str = field(default="", repr=False)
    """The join token. Empty where the controller asks for none (loopback)."""

    metrics: str | None = None
    """HOST:PORT of this machine to serve /metrics on, for Prometheus. None: nowhere."""

    speed: float = 1.0
    """Slows this node's devices down to this share of their speed, for tests and demos on equal hardware."""

    share_gpu: int = 1
    """Agents that share each of this node's GPUs. This one announces its part of their memory and speed."""

    threads: int | None = None
    """OMP_NUM_THREADS of workers. None: the cores that this agent may use, or of a worker bound to a NUMA node
    those of the node, over the devices there."""

    def __post_init__(self) -> None:
        if not self.controllers:
            raise SettingError("controllers", self.controllers, "is empty", "Give --controller HOST:PORT")
        for controller in self.controllers:
            try:
                split_address(controller)
            except BadInput as error:
                raise SettingError("controller", controller, f"cannot be used: {error}", "Give HOST:PORT") from error
        if self.metrics is not None:
            check_address("metrics", self.metrics)
        optional = (("island", self.island), ("rack", self.rack))
        named = [("name", self.name), *(each for each in optional if each[1])]
        for setting, value in named:
            if not NODE_NAME.fullmatch(value):
                why = "must be 1 to 63 letters, digits, '.', '_' or '-', the first a letter or digit"
                raise SettingError(setting, value, why, f"Give --{setting}")
        if not 0 < self.speed <= 1:  # "not", so that NaN is refused too
            raise SettingError("speed", self.speed, "must be above 0 and at most 1", "Leave it out for 1.0")
        if not self.volunteer and (self.owner != OwnersLimits() or self.uplink_bps is not None):
            raise SettingError("volunteer", False, "is needed for an owner's limits", "Give --volunteer")
        if self.uplink_bps is not None and not 1e3 <= self.uplink_bps <= 1e12:
            raise SettingError("uplink_bps", self.uplink_bps, "must be 1e3 to 1e12", "Give --uplink-mbps, as in 20")
        if not 1 <= self.share_gpu <= MAX_SHARERS:
            raise SettingError("share_gpu", self.share_gpu, f"must be 1 to {MAX_SHARERS}", "Leave it out for 1")
        if self.threads is not None and not 1 <= self.threads <= 4096:
            raise SettingError("threads", self.threads, "must be 1 to 4096", "Leave it out for cores / devices")
        if len(self.token) > 4096:
            raise SettingError("token", f"{len(self.token)} characters", "is too long", "At most 4096")

    @property
    def jobs(self) -> Path:
        """Folder for checkpoints of jobs without a directory of their own."""
        return (self.jobs_dir or self.state_dir / "jobs").absolute()
