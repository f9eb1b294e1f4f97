"""Signatures, tokens and who is let in without."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import master_pb2 as pb
from penstock.tube.codec.proto import shared_pb2
from penstock.tube.engine.access import ClientAccess, sign
from penstock.tube.engine.master.master import MasterEngine
from penstock.tube.engine.master.settings import TopicSetting
from tests.engine.tube.master_harness import NOW, ask

HOUR = 3_600_000


def signed(user: str = "usr", password: str = "pw", time: int = NOW) -> shared_pb2.MasterCertificateInfo:
    info = shared_pb2.AuthenticateInfo(userName=user, timestamp=time, nonce=5, othParams="")
    info.signature = sign(user, password, time, 5)
    return shared_pb2.MasterCertificateInfo(authInfo=info)


def with_token(token: str) -> shared_pb2.MasterCertificateInfo:
    return shared_pb2.MasterCertificateInfo(authorizedToken=token)


def access(**options: Any) -> ClientAccess:
    return ClientAccess({"usr": "pw", "two": "other"}, **options)


def test_the_reference_sample_of_a_signature() -> None:
    assert sign("usr", "pw", 1700000000000, 12345) == "HK11ZMNACviy1YCSTtEn0rhCAJM%3D"


@pytest.mark.parametrize(
    "info",
    [
        signed(password="wrong"),
        signed(user="nobody"),
        signed(time=NOW - 20_001),
        signed(time=NOW + 20_001),
        with_token("usr"),
        with_token(f"usr {NOW + HOUR} AAAA"),
        with_token(f"nobody {NOW + HOUR} AAAA"),
        with_token("usr x y"),
        with_token("usr 1 2 3"),
        with_token("a b c d e"),
        with_token(f"usr {'9' * 5_000} AAAA"),
        with_token(f"usr {'9' * 5_000} 7 AAAA"),
        with_token(f"usr {NOW} --7 AAAA"),
        with_token(f"usr {NOW} {'9' * 5_000} AAAA"),
        shared_pb2.MasterCertificateInfo(),
    ],
)
def test_invalid_credentials_are_refused(info: shared_pb2.MasterCertificateInfo) -> None:
    assert access().admit(info, "10.0.0.1", "group", NOW) is None
    assert access().admit_token(info.authorizedToken, "10.0.0.1", "group", NOW) is None


def test_a_signature_gives_a_token_that_any_server_with_the_users_takes() -> None:
    passed = access().admit(signed(), "10.0.0.1", None, NOW)
    assert passed is not None
    other = access()
    later = other.admit(with_token(passed.token), "10.0.0.1", None, NOW + HOUR // 2)
    assert later is not None
    assert (later.user, later.token, later.renew) == ("usr", "", False)
    soon = other.admit(with_token(passed.token), "10.0.0.1", None, NOW + HOUR * 4 // 5)
    assert soon is not None
    assert soon.renew
    assert other.admit(with_token(passed.token), "10.0.0.1", None, NOW + HOUR) is None
    assert other.admit_token(passed.token, "10.0.0.1", None, NOW) == "usr"
    assert not ClientAccess({"usr": "changed"}).admit_token(passed.token, "", None, NOW)
    assert not other.admit_token(passed.token.replace("usr", "two"), "", None, NOW)


def test_a_token_cannot_be_made_to_last() -> None:
    passed = access(token_ms=10 * HOUR).admit(signed(), "", None, NOW)
    assert passed is not None
    assert not access().admit_token(passed.token, "", None, NOW)


def test_a_java_consumers_signed_token_towards_a_broker() -> None:
    text = f"usr {NOW} 7 {sign('usr', 'pw', NOW, 7)}"
    assert access().admit_token(text, "", None, NOW) == "usr"
    assert not access().admit_token(text, "", None, NOW + 30_000)
    assert not access().admit_token(text.replace("usr", "two"), "", None, NOW)


def test_exempt_networks_and_groups_are_accepted_without_credentials() -> None:
    rules = access(networks=["10.1.0.0/16", "::1/128"], groups=["legacy"])
    for peer, group, admitted in [
        ("10.1.2.3", None, True),
        ("::1", None, True),
        ("10.2.0.1", "legacy", True),
        ("10.2.0.1", "other", False),
        ("not an address", None, False),
    ]:
        assert (rules.admit(shared_pb2.MasterCertificateInfo(), peer, group, NOW) is not None) == admitted
        assert rules.admit_token("", peer, group, NOW) == ("" if admitted else None)


def test_anonymous_clients_and_clients_that_show_something_wrong() -> None:
    rules = access(anonymous=True)
    passed = rules.admit(shared_pb2.MasterCertificateInfo(), "10.0.0.1", "group", NOW)
    assert passed is not None
    assert passed.user == ""
    assert rules.admit_token("", "10.0.0.1", None, NOW) == ""
    assert rules.admit(signed(), "", None, NOW) is not None
    for wrong in (signed(password="wrong"), with_token("usr 1 2")):
        assert rules.admit(wrong, "", None, NOW) is None
    assert rules.admit_token("usr 1 2", "", None, NOW) is None


def test_other_users_end_tokens() -> None:
    rules = access()
    passed = rules.admit(signed(), "", None, NOW)
    assert passed is not None
    assert rules.admit_token(passed.token, "", None, NOW) == "usr"
    assert rules.still_accepts("usr", "topic", "group")
    rules.change({"two": "other"}, None, anonymous=False)
    assert rules.admit_token(passed.token, "", None, NOW) is None
    assert not rules.still_accepts("usr", "topic", "group")
    assert rules.still_accepts("", "topic", "group")


def test_the_master_asks_everybody_and_renews_tokens() -> None:
    engine = MasterEngine([TopicSetting("demo")], NOW, access=access())
    request = pb.RegisterRequestP2M(clientId="p", brokerCheckSum=-1, hostName="h")
    assert ask(engine, MethodId.PRODUCER_REGISTER, request).errCode == 415
    request.authInfo.CopyFrom(signed())
    token = ask(engine, MethodId.PRODUCER_REGISTER, request).authorizedInfo.authAuthorizedToken
    beat = pb.HeartRequestP2M(clientId="p", brokerCheckSum=-1, hostName="h", authInfo=with_token(token))
    answer = ask(engine, MethodId.PRODUCER_HEARTBEAT, beat)
    assert (answer.errCode, answer.requireAuth, answer.authorizedInfo.authAuthorizedToken) == (200, False, "")
    assert ask(engine, MethodId.PRODUCER_HEARTBEAT, beat, NOW + HOUR - 1000).requireAuth
    assert ask(engine, MethodId.PRODUCER_HEARTBEAT, beat, NOW + HOUR).errCode == 415
    for method, message in [
        (
            MethodId.CONSUMER_REGISTER,
            pb.RegisterRequestC2M(clientId="c", groupName="gg", hostName="h", topicList=["demo"]),
        ),
        (MethodId.CONSUMER_CLOSE, pb.CloseRequestC2M(clientId="c", groupName="gg")),
        (MethodId.PRODUCER_CLOSE, pb.CloseRequestP2M(clientId="p")),
        (MethodId.BROKER_CLOSE, pb.CloseRequestB2M(brokerId="1")),
    ]:
        assert ask(engine, method, message).errCode == 415
