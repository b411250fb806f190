"""How a client checks a broker's certificate and shows its own."""

from __future__ import annotations

import ssl

from broker.errors import NotConnectedError
from broker.settings import ConnectSettings


def tls_context(settings: ConnectSettings) -> ssl.SSLContext | None:
    """By the files of the settings; None: they name none, and the system's authorities do.

    Raises:
        NotConnectedError: a file can't be used.
    """
    if not settings.tls_ca_file and not settings.tls_cert_file:
        return None
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca_file or None)
        if settings.tls_cert_file:
            context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file or None)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(filter(None, (settings.tls_ca_file, settings.tls_cert_file, settings.tls_key_file)))
        raise NotConnectedError(f"TLS: can't use {files}: {error}") from error
    return context
