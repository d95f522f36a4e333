"""Files that a running service reads again: tokens, certificates, and its log."""

from __future__ import annotations

import asyncio
import logging

from tierstore.access.audit import Audit
from tierstore.logs import reopen
from tierstore.service.access import Access
from tierstore.service.reactor.allowed import Allowed
from tierstore.service.tls import Tls

logger = logging.getLogger(__name__)

POLL_S = 1.0


class Files:
    """Reads files again while the service runs: certificates, tokens, log.

    When tokens change, reactors forget the callers that they may answer. None: there are no reactors.
    """

    def __init__(self, access: Access, tls: Tls | None, allowed: Allowed | None, audit: Audit) -> None:
        self._tokens, self._tls, self._allowed, self._audit = access.tokens, tls, allowed, audit
        self._generation = self._tokens.generation

    async def follow(self) -> None:
        """Check periodically whether files have changed, for ever."""
        while True:
            await asyncio.sleep(POLL_S)
            self._refresh()

    def renew(self) -> None:
        """Handle SIGHUP: read certificates and tokens again now, and open the files of the log and the audit anew."""
        reopen()
        self._audit.close()  # the next line opens its file again
        logger.info("SIGHUP: certificates and tokens are read again, files of the log and of the audit opened anew")
        self._refresh(anyway=True)

    def _refresh(self, *, anyway: bool = False) -> None:
        if self._tls is not None:
            self._tls.refresh(anyway=anyway)
        self._tokens.refresh()
        if self._tokens.generation != self._generation:
            self._generation = self._tokens.generation
            if self._allowed is not None:
                self._allowed.clear()
