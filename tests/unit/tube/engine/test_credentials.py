"""Credentials of a client: signature, then token, then a signature again."""

from __future__ import annotations

from penstock.tube.codec.proto import shared_pb2
from penstock.tube.engine.client.request_session import ClientCredentials


def test_signature_then_token_then_signature() -> None:
    shown = ClientCredentials("usr", "pw", lambda: 1_700_000_000_000, lambda: 12345)
    signed = shown.certificate()
    assert signed.authInfo.signature == "HK11ZMNACviy1YCSTtEn0rhCAJM%3D"
    assert signed.IsInitialized()
    assert shown.broker_token() == "usr 1700000000000 12345 HK11ZMNACviy1YCSTtEn0rhCAJM%3D"
    shown.authorized(shared_pb2.MasterAuthorizedInfo(visitAuthorizedToken=1, authAuthorizedToken="t"))
    assert shown.certificate() == shared_pb2.MasterCertificateInfo(authorizedToken="t")
    assert shown.broker_token() == "t"
    shown.authorized(shared_pb2.MasterAuthorizedInfo(visitAuthorizedToken=1), sign_again=True)
    assert shown.certificate().HasField("authInfo")
    shown.authorized(shared_pb2.MasterAuthorizedInfo(visitAuthorizedToken=1, authAuthorizedToken="u"), sign_again=True)
    assert shown.broker_token() == "u"
    shown.refused()
    assert shown.certificate().HasField("authInfo")
