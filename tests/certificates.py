"""A certificate authority for tests: PEM files on disk, with any names, any end, and renewal in place."""

from __future__ import annotations

import datetime
import itertools
from pathlib import Path
from typing import Any

from pdxfer.control import Tls
from tests.conftest import require

__all__ = ["Authority"]


class Authority:
    """Signs for one directory. Needs the ``cryptography`` package."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        require("cryptography")
        self.directory, self._count = directory, itertools.count()
        directory.mkdir(exist_ok=True)
        self._name, self._key = _subject(name), _new_key()
        self._certificate = _build(self._name, self._name, self._key, self._key, [], 1, ca=True)
        self.path = self._write(f"{name}.pem", _pem(self._certificate))

    def tls(self, *names: str, peers: tuple[str, ...], common_name: str = "", days: int = 1) -> Tls:
        """A certificate for these URIs and DNS names, in fresh files, and whom its owner lets in."""
        stem = f"leaf{next(self._count)}"
        tls = Tls(
            ca=str(self.path),
            cert=str(self.directory / f"{stem}.pem"),
            key=str(self.directory / f"{stem}.key"),
            peers=peers,
        )
        self.renew(tls, *names, common_name=common_name, days=days)
        return tls

    def renew(self, tls: Tls, *names: str, common_name: str = "", days: int = 1) -> None:
        """Put another certificate and key into the files of ``tls``."""
        key = _new_key()
        made = _build(_subject(common_name), self._name, key, self._key, names, days)
        self._write(Path(tls.key).name, _private(key))
        self._write(Path(tls.cert).name, _pem(made))

    def _write(self, name: str, data: bytes) -> Path:
        path, fresh = self.directory / name, self.directory / "fresh"
        fresh.touch(0o600)
        fresh.write_bytes(data)
        fresh.rename(path)
        return path


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _subject(common_name: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)] if common_name else [])


def _build(subject: Any, issuer: Any, key: Any, signer: Any, names: Any, days: int, *, ca: bool = False) -> Any:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    now = datetime.datetime.now(datetime.timezone.utc)
    sans = [x509.UniformResourceIdentifier(n) if "://" in n else x509.DNSName(n) for n in names]
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    )
    if sans:
        builder = builder.add_extension(x509.SubjectAlternativeName(sans), critical=False)
    return builder.sign(signer, hashes.SHA256())


def _pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _private(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization as s

    return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
