"""Holders of revoked certificates: refused, and cut off in the middle of what they have open."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509

from atoll.errors import BadInput, NotAllowed
from atoll.network.rpc import stamp_of
from atoll.security import revocation_list

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0


@dataclass(eq=False, slots=True)
class _OpenCall:
    task: asyncio.Task[object]
    revoked: bool = False


class Revocations:
    """ca: the authority's certificate, beside which its list lies. Raises BadInput where that cannot be read."""

    def __init__(self, ca: Path) -> None:
        self._ca = ca
        self._list = ca.with_name(revocation_list.FILE)
        self._stamp = stamp_of(self._list)
        self._revoked = revocation_list.read(ca)
        self._open: dict[int, set[_OpenCall]] = {}

    async def follow(self) -> None:
        """Read the list whenever it changes, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            stamp = stamp_of(self._list)
            if stamp == self._stamp:
                continue
            self._stamp = stamp
            try:
                self._revoked = revocation_list.read(self._ca)
            except BadInput as error:
                logger.error("%s Until then the list before it counts", error)
                continue
            logger.info("%d certificates are revoked", len(self._revoked))
            for serial in self._revoked & self._open.keys():
                for call in self._open[serial]:
                    call.revoked = True
                    call.task.cancel()

    @contextmanager
    def checked(self, certificate: bytes, name: str) -> Iterator[None]:
        """Around a call by the holder of this certificate (PEM). Raises NotAllowed where it is revoked, at once or as
        soon as it is."""
        serial = x509.load_pem_x509_certificate(certificate).serial_number
        refusal = NotAllowed(f"the certificate {name!r} is revoked. Ask for a new one, made with `atoll certs`")
        if serial in self._revoked:
            raise refusal
        task = asyncio.current_task()
        assert task is not None
        call, cancelling = _OpenCall(task), task.cancelling()
        self._open.setdefault(serial, set()).add(call)
        try:
            yield
        except asyncio.CancelledError:
            if call.revoked and task.uncancel() <= cancelling:
                raise refusal from None
            raise
        finally:
            self._open[serial].discard(call)
            if not self._open[serial]:
                del self._open[serial]
