"""The page's certificate, of the files as they are at each handshake: a renewed one is used without a restart."""

from __future__ import annotations

import logging
import ssl

from atoll.errors import BadInput
from atoll.network.rpc import Tls

logger = logging.getLogger(__name__)


class RenewedCertificate:
    """Used by the server's event loop."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._stamp = tls.stamp()
        self._newest: ssl.SSLContext | None = None

    def present(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str, context: ssl.SSLContext) -> None:
        """Give the connection the newest certificate of the files, if its key fits.

        `SSLContext` calls this at each handshake, as its `sni_callback`."""
        if (stamp := self._tls.stamp()) != self._stamp:
            self._stamp = stamp
            try:
                self._tls.check()
                newest = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                newest.load_cert_chain(self._tls.certificate, self._tls.key)
                self._newest = newest
            except (BadInput, OSError) as error:  # one was copied and the other one not yet
                logger.warning("%s The files before are used", error)
        if self._newest is not None:
            connection.context = self._newest
