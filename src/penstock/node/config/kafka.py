"""Configuration of a Kafka topic as the target of a rule."""

from __future__ import annotations

from pydantic import Field

from penstock.node.config.client_files import check_client_files
from penstock.node.config.listeners import Section
from penstock.runtime.io.tls import TlsOptions, read_password
from penstock.runtime.kafka.config import KafkaCompression, KafkaSasl, KafkaServer, KafkaTls, TopicName

__all__ = ["KafkaSection"]


class KafkaSection(Section):
    """Topic of a Kafka cluster, or of another server with its protocol, as the target of a rule."""

    bootstrap: list[KafkaServer] = Field(
        min_length=1, description="HOST:PORT of brokers from which the others are found"
    )
    topic: TopicName = Field(description="topic, which must exist or be created by Kafka")
    compression: KafkaCompression = Field(default=KafkaCompression.NONE, description="compression of batches")
    tls: KafkaTls | None = Field(default=None, description="TLS of the connections; default: plain TCP")
    sasl: KafkaSasl | None = Field(default=None, description="authentication; default: none")

    def check_files(self) -> None:
        """Read certificates and secrets, but not the token, which another program may write later.

        Raises:
            ConfigError: a file cannot be used.
        """
        where = f"rules: topic {self.topic!r} of Kafka"
        if (tls := self.tls) is not None:
            check_client_files(TlsOptions(tls.ca, tls.certificate, tls.key), where)
        if (sasl := self.sasl) is None:
            return
        if sasl.password_file is not None:
            read_password(sasl.password_file)
        if (oidc := sasl.oidc) is not None:
            read_password(oidc.client_secret_file, "client_secret_file")
            if oidc.ca is not None:
                check_client_files(TlsOptions(ca_file=oidc.ca), where, prefix="oidc.")
