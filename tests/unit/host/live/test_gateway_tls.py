"""HTTPS of a gateway, and errors of its address and certificate."""

from __future__ import annotations

import re
import socket
import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from support.fake_upstream import Stage, staged

from coldstart.errors import UsageError
from coldstart.host.endpoint import GatewayEndpoint
from coldstart.host.live.http_server import listen


def write_certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """Write a certificate of 127.0.0.1 with this subject, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (directory / "new.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    (directory / "new.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return (directory / "new.pem").replace(directory / "cert.pem"), (directory / "new.key").replace(
        directory / "key.pem"
    )


async def accepts(stage: Stage, trusted: Path) -> bool:
    """Return whether a client that trusts one certificate alone gets an answer."""
    context = ssl.create_default_context(cafile=trusted)
    try:
        async with (
            aiohttp.ClientSession() as client,
            client.get(stage.url + "/health", ssl=context) as answer,
        ):
            return answer.status == 200
    except aiohttp.ClientConnectorCertificateError:
        return False


async def test_request_over_tls_succeeds(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path, "first")
    endpoint = GatewayEndpoint(tls_cert=cert, tls_key=key)
    async with staged(tmp_path, gateway={"endpoint": endpoint}) as stage:
        assert stage.url.startswith("https://") and await accepts(stage, cert)


@pytest.mark.parametrize("broken", ["cert.pem", "key.pem"])
def test_listen_reports_a_certificate_that_cannot_be_used(tmp_path: Path, broken: str) -> None:
    cert, key = write_certificate(tmp_path, "first")
    (tmp_path / broken).write_text("nothing")
    endpoint = GatewayEndpoint(port=0, tls_cert=cert, tls_key=key)
    with pytest.raises(UsageError, match="cannot use the certificate"), listen(endpoint):
        pass


def test_listen_names_the_address_and_a_hint_when_the_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(UsageError, match=f"cannot listen at 127.0.0.1:{port}") as error,
            listen(GatewayEndpoint(port=port)),
        ):
            pass
        assert str(error.value.message).endswith("another process listens there")
        other = re.fullmatch(r"choose another port: --port (\d+)", str(error.value.hint))
        assert other is not None
        with listen(GatewayEndpoint(port=int(other[1]))):
            pass


def test_listen_names_the_reason_once_when_the_address_is_of_another_machine() -> None:
    endpoint = GatewayEndpoint("192.0.2.77", 0, insecure=True)
    with pytest.raises(UsageError) as error, listen(endpoint):
        pass
    assert error.value.message == "cannot listen at 192.0.2.77:0: Cannot assign requested address"


def test_listen_refuses_a_port_above_65535() -> None:
    with pytest.raises(UsageError, match="99999"), listen(GatewayEndpoint("127.0.0.1", 99999)):
        raise AssertionError("it listens")
