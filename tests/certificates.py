"""Certificates made for a test: an authority, and what it signed."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Authority:
    """A certificate authority in a folder of its own: `ca.crt` is what others check by."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.ca_file = str(folder / "ca.crt")
        self._openssl(*_KEY, "-x509", "-days", "2", "-subj", f"/CN={name}", "-keyout", "ca.key", "-out", "ca.crt")

    def sign(self, name: str, *addresses: str, days: int = 2) -> tuple[str, str]:
        """Certificate and key for these IP addresses, for server and client use."""
        names = "subjectAltName=" + ",".join(f"IP:{address}" for address in addresses)
        self._openssl(*_KEY, "-subj", f"/CN={name}", "-addext", names, "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-copy_extensions", "copy")
        self._openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-days", str(days), "-out", f"{name}.crt")
        return str(self.folder / f"{name}.crt"), str(self.folder / f"{name}.key")

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=self.folder)


_KEY = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
