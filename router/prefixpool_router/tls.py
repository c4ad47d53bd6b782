"""TLS for clients, from certificate files that may be renewed while the router runs."""

from __future__ import annotations

import logging
import ssl
from typing import Any, Final

from prefixpool.errors import SettingsError
from prefixpool_router.watched_file import WatchedFile

_log = logging.getLogger(__name__)
_FAREWELL_S: Final = 5.0  # for a client to confirm that a connection ends
_MINIMUM: Final = ssl.TLSVersion.TLSv1_2


def server_tls(certificate: str, key: str) -> ServerTls | None:
    """None: neither file was named, so clients speak plain HTTP. Raises SettingsError as ServerTls does, or for one."""
    if bool(certificate) != bool(key):
        raise SettingsError("--tls-cert-file and --tls-key-file are needed together")
    return ServerTls(certificate, key) if certificate else None


class ServerTls:
    """One SSLContext for the life of the listener: new connections get the newest certificate, running ones keep theirs."""

    def __init__(self, certificate: str, key: str) -> None:
        """Raises SettingsError if the files can't be read or don't belong together."""
        self._paths = (certificate, key)
        self._files = tuple(WatchedFile(path, bytes) for path in self._paths)
        self.context = self._loaded(_new_context())

    def refresh(self) -> bool:
        """Load the pair again if either file changed and both fit; True if so. Half a renewal changes nothing."""
        changed = [file.refresh() for file in self._files]
        if not any(changed):
            return False
        try:
            self._loaded(_new_context())
            self._loaded(self.context)  # which may find yet other files: those are seen at the next look
        except SettingsError as error:
            _log.warning("Keeping the last good certificate", extra={"cause": str(error)})
            return False
        return True

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        try:
            context.load_cert_chain(*self._paths)
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(f"{self._paths[0]}, {self._paths[1]}: not a certificate and its key: {error}") from error
        return context


def listening_tls(tls: ServerTls | None, *, handshake_s: float) -> dict[str, Any]:
    """Arguments of `create_server`. Until its handshake is done a connection is asyncio's, and knows no other deadline."""
    if tls is None:
        return {}
    return {"ssl": tls.context, "ssl_handshake_timeout": handshake_s, "ssl_shutdown_timeout": min(handshake_s, _FAREWELL_S)}


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _MINIMUM
    context.set_alpn_protocols(["http/1.1"])
    return context
