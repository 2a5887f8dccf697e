"""Certificates as OpenSSL wants them, in files; and one for `--self-signed`, as a laptop has none for HTTP/2."""

from __future__ import annotations

import datetime
import ipaddress
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from novainfer import InvalidParameter

Certificate = tuple[bytes, bytes]  # with its chain, and its key, both in PEM
VALID_DAYS = 30  # it is made anew at every start


def write_self_signed(folder: Path, host: str) -> tuple[Path, Path]:
    """Write a fresh certificate for `host`, localhost and the loopback addresses, and its key; returns both paths.

    Raises `InvalidParameter` when the cryptography package is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError:
        raise InvalidParameter(
            "self_signed needs the cryptography package: pip install 'novainfer[tls]'", param="self_signed"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [x509.DNSName("localhost")]
    addresses = {"127.0.0.1", "::1"}
    try:
        addresses.add(str(ipaddress.ip_address(host)))
    except ValueError:
        names.append(x509.DNSName(host))
    names.extend(x509.IPAddress(ipaddress.ip_address(address)) for address in sorted(addresses))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "NovaInfer self-signed")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)  # so that it can be trusted
        .sign(key, hashes.SHA256())
    )
    certfile, keyfile = folder / "cert.pem", folder / "key.pem"
    certfile.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    keyfile.touch(mode=0o600)
    keyfile.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certfile, keyfile


@contextmanager
def as_files(certificate: Certificate) -> Iterator[tuple[Path, Path]]:
    """Files with a certificate and its key, for as long as this lasts: OpenSSL reads nothing else."""
    with tempfile.TemporaryDirectory(prefix="novainfer-") as folder:
        paths = Path(folder) / "cert.pem", Path(folder) / "key.pem"
        for path, data in zip(paths, certificate, strict=True):
            path.touch(mode=0o600)
            path.write_bytes(data)
        yield paths
