"""Server credentials from PEM files, which are read again when they are renewed."""

import logging

import grpc

from expertmesh.deploy.edge_settings import TlsSettings

_log = logging.getLogger(__name__)


class TlsError(OSError):
    """The files can not be used. The message names them."""


def credentials(settings: TlsSettings) -> grpc.ServerCredentials:
    """With client_ca_file, a client without a certificate of that authority gets no connection.
    Raises TlsError."""
    files = _Files(settings)
    return grpc.dynamic_ssl_server_credentials(
        files.configuration(),
        files.renewed,  # type: ignore[arg-type]  # it may return None, say grpcio's own documents
        settings.client_ca_file is not None,
    )


class _Files:
    def __init__(self, settings: TlsSettings) -> None:
        self._settings = settings
        self._seen = self._signature()

    def _signature(self) -> tuple[tuple[int, int, int], ...]:
        try:
            found = [path.stat() for path in self._settings.files]
        except OSError as error:
            raise TlsError(f"{error.filename}: {error.strerror}") from None
        return tuple((one.st_mtime_ns, one.st_ino, one.st_size) for one in found)

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """Raises TlsError. OpenSSL checks that key and certificate belong together: grpcio takes
        anything, and then fails each handshake without a word."""
        try:
            self._settings.check()
            pems = [path.read_bytes() for path in self._settings.files]
        except (OSError, ValueError) as error:
            names = ", ".join(map(str, self._settings.files))
            raise TlsError(f"TLS files {names}: {error}") from None
        return grpc.ssl_server_certificate_configuration(
            [(pems[1], pems[0])], pems[2] if len(pems) > 2 else None
        )

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Asked at each handshake, on a thread of grpcio's. None: as before."""
        try:
            signature = self._signature()
            if signature == self._seen:
                return None
            configuration = self.configuration()
        except TlsError as error:
            _log.error("%s; the certificate that was in use stays", error)
            return None
        self._seen = signature
        return configuration
