from __future__ import annotations

import pytest

from atoll.security.handshakes import ended_at_once

TRIED = "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:7700: "


@pytest.mark.parametrize(
    ("details", "ended"),
    [
        (TRIED + "Socket closed", True),
        (TRIED + "recvmsg:Connection reset by peer", True),
        # 1. A busy machine: the reset comes while the other's answer is awaited. 2. gRPC adds the number of the error.
        # 3. An agent without certificates was told of a connection that failed, and nothing of certificates.
        (TRIED + "recvmsg:Connection reset by peer (104)", True),
        (TRIED + "Failed to connect to remote host: connect: Connection refused (111)", False),
        ("Socket closed", False),
    ],
)
def test_connections_that_end_at_once_are_told_from_those_that_fail(details: str, ended: bool) -> None:
    assert ended_at_once(details) is ended
