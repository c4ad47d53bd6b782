"""Keys and certificates of one cluster, made with openssl in its folder."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_DAYS: Final = "30"


class Pki:
    """A certificate authority `ca`, and what it signs: NAME.crt and NAME.key in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True)
        self._openssl("req", "-x509", *_key("ca"), "-out", "ca.crt", "-subj", "/CN=prefixpool-test-ca", "-days", _DAYS)

    def crt(self, name: str) -> Path:
        return self.folder / f"{name}.crt"

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def sign(self, name: str, subject: str, alternative_names: Sequence[str] = ()) -> None:
        """A certificate for server or client; alternative names as openssl writes them: `IP:…`, `DNS:…`."""
        extensions = self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={','.join(alternative_names)}\n" if alternative_names else "")
        self._openssl("req", *_key(name), "-out", f"{name}.csr", "-subj", subject)
        ca = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial")
        signed = ("-in", f"{name}.csr", "-out", f"{name}.crt", "-extfile", extensions.name, "-days", _DAYS)
        self._openssl("x509", "-req", *ca, *signed)

    def key_pair(self, name: str) -> None:
        """NAME.key and NAME.pub: for the tokens of service accounts."""
        self._openssl("genrsa", "-out", f"{name}.key", "2048")
        self._openssl("rsa", "-in", f"{name}.key", "-pubout", "-out", f"{name}.pub")

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, capture_output=True, timeout=60, check=True)


def _key(name: str) -> tuple[str, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key")
