"""A Kafka broker as a process: without access control, and with users over TLS; stopped and started again."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import time
import uuid
from http.server import HTTPServer
from pathlib import Path
from urllib.parse import parse_qsl

import trustme
from confluent_kafka import Consumer, Message, TopicPartition
from cryptography.hazmat.primitives import serialization

from benchmarks.kafka_peer.broker import KafkaPeer, prepare
from penstock.errors import PenstockError
from penstock.spark.environment.java import find_java
from tests.http_server import Handler, HttpThread
from tests.ports import free_ports
from tests.tools import skip_or_fail

__all__ = ["PASSWORD", "USER", "KafkaBroker", "TokenEndpoint", "committed", "find_jars", "token"]

DEADLINE_S = 180
USER, PASSWORD = "app", "secret-of-app"
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
_MODULES = "org.apache.kafka.common.security"


def token() -> str:
    """A token without signature, which the broker accepts."""
    claims = {"sub": USER, "iat": int(time.time()) - 60, "exp": int(time.time()) + 3600}
    parts = [
        base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in ({"alg": "none"}, claims)
    ]
    return ".".join([*parts, ""])


class TokenEndpoint(HttpThread):
    """The token endpoint of an identity provider, which issues :func:`token` to one client. A context manager."""

    CLIENT, SECRET = "penstock", "secret-of-client"

    def __init__(self) -> None:
        self.requests: list[dict[str, str]] = []
        """Fields of the requests."""
        endpoint = self
        known = base64.b64encode(f"{self.CLIENT}:{self.SECRET}".encode()).decode()

        class _Handler(Handler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                endpoint.requests.append(dict(parse_qsl(body)))
                if self.headers["Authorization"] == f"Basic {known}":
                    status, answer = 200, {"access_token": token(), "token_type": "bearer", "expires_in": 3600}
                else:
                    status, answer = 401, {"error": "invalid_client", "error_description": "unknown secret"}
                self.respond(status, json.dumps(answer).encode())

        super().__init__(HTTPServer(("127.0.0.1", 0), _Handler))
        self.url = f"http://{self.address}/token"


class KafkaBroker:
    """Broker and controller in ``folder``. ``address`` has no access control, ``secure`` has TLS and users.

    Topics are created with three partitions when they are first used; messages have at most 100 kB.
    """

    def __init__(self, folder: Path) -> None:
        self._peer = find_jars()
        self._folder = folder
        port, secure, controller = free_ports(3)
        self.address, self.secure = f"127.0.0.1:{port}", f"127.0.0.1:{secure}"
        authority = trustme.CA()
        self.ca = folder / "ca.pem"
        authority.cert_pem.write_to_path(self.ca)
        certificate = folder / "broker.pem"
        issued = authority.issue_cert("127.0.0.1")
        key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
        certificate.write_bytes(key.private_bytes(*form) + chain)
        plain = f'username="{USER}" password="{PASSWORD}" user_{USER}="{PASSWORD}"'
        modules = {
            "plain": f"{_MODULES}.plain.PlainLoginModule required {plain};",
            "scram-sha-256": f"{_MODULES}.scram.ScramLoginModule required;",
            "scram-sha-512": f"{_MODULES}.scram.ScramLoginModule required;",
            "oauthbearer": f"{_MODULES}.oauthbearer.OAuthBearerLoginModule required"
            ' unsecuredLoginStringClaim_sub="broker";',
        }
        lines = [
            "process.roles=broker,controller",
            "node.id=1",
            f"controller.quorum.bootstrap.servers=127.0.0.1:{controller}",
            f"listeners=PLAINTEXT://{self.address},SASL_SSL://{self.secure},CONTROLLER://127.0.0.1:{controller}",
            "controller.listener.names=CONTROLLER",
            "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,SASL_SSL:SASL_SSL,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name=PLAINTEXT",
            f"log.dirs={folder}/data",
            "num.partitions=3",
            "message.max.bytes=100000",
            "group.initial.rebalance.delay.ms=0",
            "offsets.topic.replication.factor=1",
            "transaction.state.log.replication.factor=1",
            "transaction.state.log.min.isr=1",
            f"sasl.enabled.mechanisms={','.join(MECHANISMS)}",
            "ssl.keystore.type=PEM",
            f"ssl.keystore.location={certificate}",
            *(f"listener.name.sasl_ssl.{name}.sasl.jaas.config={module}" for name, module in modules.items()),
        ]
        self._settings = folder / "server.properties"
        self._settings.write_text("\n".join(lines) + "\n")
        number = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        scram = [
            word
            for name in MECHANISMS[1:3]
            for word in ("--add-scram", f"{name}=[name={USER},password={PASSWORD},iterations=4096]")
        ]
        format_ = [*self._java(), "kafka.tools.StorageTool", "format", "--standalone", f"--cluster-id={number}", *scram]
        done = subprocess.run([*format_, "-c", str(self._settings)], capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 0, done.stdout + done.stderr
        self._process: subprocess.Popen[bytes] | None = None

    def _java(self) -> list[str]:
        short_run = ("-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
        return [str(find_java().home / "bin" / "java"), *short_run, "-cp", f"{self._peer.broker}/*"]

    def start(self) -> None:
        """Start, and wait until it accepts connections."""
        log = self._folder / "kafka.log"
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [*self._java(), "kafka.Kafka", str(self._settings)],
                cwd=self._folder,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        end = time.monotonic() + DEADLINE_S
        while not all(_accepts(address) for address in (self.address, self.secure)):
            assert self._process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.1)

    def stop(self) -> None:
        """End it as a failure does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(DEADLINE_S)
            self._process = None


def committed(address: str, topic: str) -> list[Message]:
    """Return the messages of ``topic`` that consumers with ``read_committed`` read now, by partition."""
    settings = {"bootstrap.servers": address, "group.id": "reader", "isolation.level": "read_committed"}
    consumer = Consumer({**settings, "enable.auto.commit": False, "enable.partition.eof": True})
    found: list[Message] = []
    try:
        numbers = consumer.list_topics(topic, DEADLINE_S).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, 0) for number in numbers])
        ends: set[int | None] = set()
        end = time.monotonic() + DEADLINE_S
        while len(ends) < len(numbers):
            assert time.monotonic() < end, f"{len(found)} messages were read"
            for message in consumer.consume(10_000, 0.2):
                error = message.error()
                if error is None:
                    found.append(message)
                elif error.name() == "_PARTITION_EOF":
                    ends.add(message.partition())
    finally:
        consumer.close()
    return found


def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def find_jars() -> KafkaPeer:
    """The jars, fetched once; skips (or fails) the test if that is not possible."""
    try:
        return prepare()
    except PenstockError as error:
        skip_or_fail(f"Kafka is not available: {error}")
        raise AssertionError from error
