"""Settings that a controller is started with. Every setting has a unit, a check, and an error that says what to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atoll.errors import SettingError
from atoll.host.ports import DEFAULT_ADDRESS, DEFAULT_ETCD_PORT
from atoll.network.rpc import Tls, is_loopback, split_address
from atoll.telemetry.prometheus import check_address


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Raises SettingError (or BadInput for an address that is none) when made."""

    data_dir: Path
    """Folder of the private etcd, logs of jobs and the `address` file. One controller per folder."""

    listen: str = DEFAULT_ADDRESS
    """HOST:PORT to serve on. Port 0 takes a free one; the file `address` in data_dir tells which."""

    advertise: str | None = None
    """HOST:PORT under which agents and clients reach this controller; `listen` where left out."""

    etcd: tuple[str, ...] = ()
    """HOST:PORT of each member of an etcd cluster. Empty: a private etcd as a child process."""

    etcd_tls: Tls | None = None
    """This controller's certificate for etcd, without which one on another machine is not used."""

    tls: Tls | None = None
    """This controller's certificate for agents and clients, which need certificates too then."""

    insecure: bool = False
    """Serve, and use an etcd, beyond loopback without certificates: whoever reaches either port, or is on the way,
    can run code on every node."""

    token_file: Path | None = None
    """The join token that agents must present."""

    relay: str | None = None
    """HOST:PORT of a relay (`atoll relay`) for nodes behind NAT. None: one of this controller's own, on the port after
    its own, once there is such a node."""

    relay_secret_file: Path | None = None
    """The secret of that relay."""

    metrics: str | None = None
    """HOST:PORT to serve /metrics on, for Prometheus. None: nowhere."""

    heartbeat_s: float = 1.0
    """Interval of agents' reports, in seconds."""

    node_lease_s: float = 2.8
    """A node that was silent for this long is lost, in seconds. With what telling the reconciler takes, a machine that
    vanished is noticed within 3 s."""

    leader_lease_s: int = 3
    """Seconds without the leader after which another controller leads."""

    def __post_init__(self) -> None:
        host, _ = split_address(self.listen)
        if not is_loopback(host) and self.tls is None and not self.insecure:
            raise SettingError(
                "listen",
                self.listen,
                "is reachable from other machines, and whoever reaches it can run code on every node",
                "Make certificates with `atoll certs` and give them, or accept the risk with `--insecure`",
            )
        if (self.relay is None) != (self.relay_secret_file is None):
            why = "and relay_secret_file belong together"
            raise SettingError("relay", self.relay, why, "Give --relay HOST:PORT and --relay-secret-file, or neither")
        if self.relay is not None:
            split_address(self.relay)
        if self.metrics is not None:
            check_address("metrics", self.metrics, insecure=self.insecure)
        if self.advertise is not None:
            split_address(self.advertise)
        for address in self.etcd:
            host, _ = split_address(address, DEFAULT_ETCD_PORT)
            if not is_loopback(host) and self.etcd_tls is None and not self.insecure:
                raise SettingError(
                    "etcd",
                    address,
                    "is on another machine, and whoever writes to it, or reads on the way, can run code on every node",
                    "Give --etcd-ca, --etcd-cert and --etcd-key, or accept the risk with `--insecure`",
                )
        if self.etcd_tls is not None and not self.etcd:
            raise SettingError("etcd_tls", self.etcd_tls.certificate, "needs an etcd to connect to", "Give --etcd too")
        if not 0.01 <= self.heartbeat_s <= 60:
            raise SettingError("heartbeat_s", self.heartbeat_s, "must be 0.01 to 60 seconds", "Leave it out for 1.0")
        if not 2 * self.heartbeat_s <= self.node_lease_s <= 3600:
            why = f"must be at least two heartbeats ({2 * self.heartbeat_s:g} s), or one lost packet fences a run"
            raise SettingError("node_lease_s", self.node_lease_s, why, "Raise it, or lower heartbeat_s")
        if not 1 <= self.leader_lease_s <= 3600:
            raise SettingError("leader_lease_s", self.leader_lease_s, "must be 1 to 3600 s", "Leave it out for 3")

    def read_token(self) -> str | None:
        """The join token, or None where none is asked for. Raises SettingError; the token itself is in no message."""
        if self.token_file is None:
            return None
        try:
            token = self.token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = f"cannot be read ({error.__class__.__name__})"
            raise SettingError("token_file", str(self.token_file), why, "Write a token to it") from error
        if len(token) < 16:
            why = f"holds {len(token)} characters, which can be guessed"
            raise SettingError("token_file", str(self.token_file), why, "Write at least 16 random ones to it")
        return token
