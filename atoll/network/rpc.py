"""The gRPC connections between Atoll's processes: limits, keepalive, credentials, and what errors mean.

Imported by the client, the controller and the agent alike, so that both ends of a connection agree.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from atoll.errors import (
    AtollError,
    BadInput,
    Conflict,
    ControllerUnreachable,
    DeadlineExceeded,
    NotAllowed,
    NotFound,
)
from atoll.host.ports import DEFAULT_PORT

logger = logging.getLogger(__name__)

# While grpcio deallocates a server that was never started (its port is in use), it logs that server at DEBUG. A handler
# that keeps records keeps freed memory then, and some later garbage collection ends the process with SIGSEGV.
logging.getLogger("grpc._cython.cygrpc").setLevel(logging.INFO)

MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
CODE_CHUNK_BYTES: Final = 1024 * 1024
MAX_CODE_BYTES: Final = 8 * 1024 * 1024
MAX_UNPACKED_BYTES: Final = 256 * 1024 * 1024  # what a code bundle may unpack to
LEADER_METADATA: Final = "atoll-leader"

_LIMITS: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
)
# A server that stands still, or whose machine is gone without a word, is left after 5 s: another leads by then.
# A server ends the connection of a client that pings more often than it allows. One that stood still for a moment reads
# several pings at once, so it does not count them.
CLIENT_OPTIONS: Final = (
    *_LIMITS,
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
)
SERVER_OPTIONS: Final = (
    *_LIMITS,
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a second controller on one port must fail, not share it in silence
)


@dataclass(frozen=True, slots=True)
class Tls:
    """The three PEM files of one identity: the cluster's CA, a certificate signed by it, its private key."""

    ca: Path
    certificate: Path
    key: Path

    @classmethod
    def of_environment(cls) -> Tls | None:
        """Read the identity in the folder that ATOLL_TLS_DIR names. Raises BadInput if there is none."""
        if not (folder := os.environ.get("ATOLL_TLS_DIR")):
            return None
        if not (base := Path(folder)).is_dir():
            raise BadInput(f"ATOLL_TLS_DIR {folder} is no folder. `atoll certs client DIR NAME` makes one")
        return cls(base / "ca.pem", base / "cert.pem", base / "key.pem")

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Return (ca, certificate, key) as PEM. Raises BadInput naming the file that cannot be read."""
        pems = []
        for path in (self.ca, self.certificate, self.key):
            try:
                pems.append(path.read_bytes())
            except OSError as error:
                raise BadInput(f"cannot read {path}: {error.strerror}. `atoll certs` makes these files") from error
        return pems[0], pems[1], pems[2]

    def stamp(self) -> object:
        """Return a value that changes when one of the files is replaced."""
        return stamp_of(self.ca), stamp_of(self.certificate), stamp_of(self.key)

    def check(self) -> None:
        """Raises BadInput where the key is not the certificate's, or a file is damaged."""
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate, self.key, password="")  # none: it would be asked for here
            context.load_verify_locations(self.ca)
        except (OSError, ValueError) as error:  # of which ssl.SSLError is one
            raise BadInput(
                f"{self.certificate}, {self.key} and {self.ca} cannot be used together: {error}. "
                "Copy them from one folder"
            ) from error


def stamp_of(path: Path) -> object:
    """Return a value that changes when the file is replaced or written."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def split_address(address: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """'host', 'host:port' or '[v6]:port' -> (host, port). Raises BadInput."""
    host, separator, port = address.rpartition(":")
    if not separator or host.endswith(":") or "]" in port:  # no port, or a bare IPv6 address
        host, port = address, str(default_port)
    if not port.isdigit() or not 0 <= int(port) <= 65535 or not host:
        raise BadInput(f"address {address!r} is not HOST:PORT, e.g. 10.0.0.1:{default_port}")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach `host` (a name or an address)."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_channel(address: str, tls: Tls | None) -> grpc.aio.Channel:
    """A channel to HOST:PORT; mutual TLS where `tls` is given. The caller closes it."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
    ca, certificate, key = tls.read()
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    return grpc.aio.secure_channel(address, credentials, options=CLIENT_OPTIONS)


class RenewedFiles:
    """Watches an identity's files, which a user may replace by renewed ones while they are in use."""

    def __init__(self, tls: Tls | None) -> None:
        """tls: None without certificates, which never change."""
        self._tls = tls
        self._stamp = tls.stamp() if tls is not None else None

    def newest(self) -> tuple[bytes, bytes, bytes] | None:
        """Return (ca, certificate, key) as PEM once after they were replaced, if they can be used together."""
        if self._tls is None or (stamp := self._tls.stamp()) == self._stamp:
            return None
        self._stamp = stamp
        try:
            self._tls.check()
            return self._tls.read()
        except BadInput as error:  # one was copied and the other one not yet
            logger.warning("%s The files before are used", error)
            return None


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Server side of mutual TLS: only certificates signed by the cluster's CA get through.

    Files that were replaced are used from the next connection on. Raises BadInput where they cannot be used."""

    def as_grpc_has_them(ca: bytes, certificate: bytes, key: bytes) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=ca)

    def replaced() -> Any:
        """Return the renewed certificate, or None to use the one before. gRPC's thread calls it at every handshake."""
        newest = files.newest()
        return as_grpc_has_them(*newest) if newest else None

    files = RenewedFiles(tls)
    tls.check()
    return grpc.dynamic_ssl_server_credentials(
        as_grpc_has_them(*tls.read()), replaced, require_client_authentication=True
    )


# Both directions: the client turns codes into errors, the server's interceptor errors into codes.
MEANING: Final[Mapping[grpc.StatusCode, type[AtollError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: BadInput,
    grpc.StatusCode.RESOURCE_EXHAUSTED: BadInput,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: Conflict,
    grpc.StatusCode.FAILED_PRECONDITION: Conflict,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
    grpc.StatusCode.UNAUTHENTICATED: NotAllowed,
    grpc.StatusCode.UNAVAILABLE: ControllerUnreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}


def translate(error: grpc.aio.AioRpcError, doing: str, address: str) -> AtollError:
    """Translate a gRPC error for the user. The only place on the client side that knows gRPC's codes."""
    kind = MEANING.get(error.code(), AtollError)
    details = error.details() or error.code().name
    if kind is ControllerUnreachable:
        return kind(f"{doing}: no leading controller at {address}: {details}")
    return kind(f"{doing}: {details}")


@contextmanager
def controller_errors(doing: str, address: str) -> Iterator[None]:
    """Turn gRPC's errors inside the block into AtollError."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise translate(error, doing, address) from error


def leader_hint(error: grpc.aio.AioRpcError) -> str | None:
    """The leading controller's address, where a standby named it in its refusal."""
    for key, value in error.trailing_metadata() or ():
        if key == LEADER_METADATA and isinstance(value, str) and value:
            return value
    return None
