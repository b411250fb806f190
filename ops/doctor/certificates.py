"""Whether a node's certificate would be accepted: a TLS handshake in memory, a client on one side and the server on the other."""

from __future__ import annotations

import ssl

from ops.doctor.cluster_checks import CertificateFacts
from ops.nodes.file import Cluster, NodeSection

_ROUNDS = 16
"""A handshake takes fewer flights."""


def probe_certificate(cluster: Cluster, node: NodeSection) -> CertificateFacts:
    """What a client that knows the topology's authority would say of a node's server. Nothing is listened to."""
    plan = cluster.file.broker
    cert, key, authority = (
        cluster.broker_file(setting, node.name) for setting in (plan.tls_cert_file, plan.tls_key_file, plan.tls_ca_file)
    )
    problem = handshake(cert, key, authority, node.address)
    return CertificateFacts(node=node.name, file=cert, error=problem)


def handshake(cert: str, key: str, authority: str, address: str) -> str:
    """Why it fails; empty: it does not. Both sides show the certificate, as servers of a cluster do."""
    try:
        server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority)
        server.verify_mode = ssl.CERT_REQUIRED
        server.load_cert_chain(cert, key)
        client = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=authority)
        client.load_cert_chain(cert, key)
    except ssl.SSLError as error:
        return f"certificate, key or authority can't be used: {error.reason or error}"
    except OSError as error:
        return error.strerror or str(error)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=address),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(_ROUNDS):
        for side in list(sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
            except ssl.SSLError as error:
                return error.reason or str(error)
            sides.remove(side)
        if not sides:
            return ""
    return "the handshake did not end"
