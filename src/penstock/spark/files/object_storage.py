"""Paths in a bucket of S3 or of storage with the same protocol, such as ``s3://bucket/lake/readings``.

pyarrow reads and writes objects, ``deltalake`` the log of a Delta table, and ``obstore`` the small objects of a state
directory and of a commit log, which are created or replaced under a condition: all with the same endpoint and region.
Credentials are those of the process: the environment (``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``,
``AWS_SESSION_TOKEN``, ``AWS_PROFILE``), the files of the AWS command line, or the role of the machine. A path is sent
to Spark's executors; it contains no credentials.
"""

from __future__ import annotations

import configparser
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import urlsplit

from penstock.errors import ConfigError, PenstockError, StorageError, UnavailableError

if TYPE_CHECKING:
    import pyarrow as pa
    from obstore.auth.boto3 import Boto3CredentialProvider
    from obstore.store import BackoffConfig, S3Store
    from pyarrow.fs import S3FileSystem

__all__ = [
    "AnyPath",
    "ObjectPath",
    "StoragePath",
    "StoredObject",
    "absolute_path",
    "endpoint_url",
    "is_object_url",
    "object_storage_error",
    "object_storage_errors",
    "open_input",
    "spark_path",
    "storage_path",
]

_URL = re.compile(r"s3a?://(?P<bucket>[A-Za-z0-9._-]+)/+(?P<key>[^?#%]*[^/?#%])/*")
_ENDPOINT_URL = re.compile(r"https?://[^/?#@]+/?")
_RETRY_S = 30
"""Seconds after which ``deltalake`` and ``obstore`` give up a request; by default they repeat it for three minutes."""


class StoredObject(NamedTuple):
    """The contents of an object, and the identity of this version of it."""

    data: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class ObjectPath:
    """An object, or the objects whose keys begin with ``key`` and a slash, in ``bucket``.

    ``endpoint`` is a URL; None is AWS. Functions on files (``open_input``, ``open_output``, ``iterdir``, ``upload``)
    raise OSError, see :func:`object_storage_errors`. Functions on whole objects (``read_bytes`` and those after it)
    raise StorageError or UnavailableError.
    """

    bucket: str
    key: str
    endpoint: str | None
    region: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    def __truediv__(self, name: str) -> ObjectPath:
        return replace(self, key=f"{self.key}/{name}")

    @property
    def name(self) -> str:
        """The part of the key after the last slash."""
        return self.key.rpartition("/")[2]

    def relative_to(self, parent: ObjectPath) -> str:
        """Return the part of the key after that of ``parent``."""
        return self.key.removeprefix(f"{parent.key}/")

    def options(self) -> dict[str, str]:
        """Return the options of ``deltalake``."""
        found = {"AWS_REGION": self.region, "retry_timeout": f"{_RETRY_S}s"}
        if self.endpoint is not None:
            found["AWS_ENDPOINT_URL"] = self.endpoint
            found["AWS_ALLOW_HTTP"] = str(self.endpoint.startswith("http://")).lower()
        return found

    def iterdir(self) -> list[ObjectPath]:
        """Return the objects below this path, without those of deeper paths; empty if there are none."""
        from pyarrow.fs import FileSelector, FileType

        found = _file_system(self.endpoint, self.region).get_file_info(
            FileSelector(self._place, allow_not_found=True, recursive=False)
        )
        return [self / info.base_name for info in found if info.type == FileType.File]

    def open_input(self) -> pa.NativeFile:
        """Open the object to read."""
        return _file_system(self.endpoint, self.region).open_input_file(self._place)

    def open_output(self) -> pa.NativeFile:
        """Open the object to write; it exists after the file was closed."""
        return _file_system(self.endpoint, self.region).open_output_stream(self._place)

    def read_text(self, encoding: str) -> str:
        """Return the contents of the object."""
        with self.open_input() as file:
            return file.read().decode(encoding)

    def upload(self, file: Path) -> None:
        """Write the contents of the local ``file``."""
        with file.open("rb") as source, self.open_output() as target:
            while block := source.read(_BLOCK_BYTES):
                target.write(block)

    def download(self, file: Path) -> None:
        """Write the contents to the local ``file``; raises as :meth:`stored`."""
        with object_storage_errors(self), self.open_input() as source, file.open("wb") as target:
            while block := source.read(_BLOCK_BYTES):
                target.write(block)

    def stored(self) -> StoredObject:
        """Return the contents and the version of the object.

        Raises:
            FileNotFoundError: it does not exist.
        """
        import obstore

        with _object_errors(self):
            found = obstore.get(self._store, self.key)
            return StoredObject(bytes(found.bytes()), found.meta["e_tag"] or "")

    def read_bytes(self) -> bytes:
        """Return the contents of the object; raises as :meth:`stored`."""
        return self.stored().data

    def exists(self) -> bool:
        """Return True if the object exists, or an object below it."""
        import obstore

        with _object_errors(self):
            try:
                obstore.head(self._store, self.key)
            except FileNotFoundError:
                return next(iter(obstore.list(self._store, self.key, chunk_size=1)), None) is not None
            return True

    def names(self) -> list[str]:
        """Return the names of the objects below this path, without those of deeper paths."""
        import obstore

        with _object_errors(self):
            found = obstore.list_with_delimiter(self._store, self.key)["objects"]
        return [each["path"].rpartition("/")[2] for each in found]

    def write_bytes(self, data: bytes) -> None:
        """Create the object, or replace it."""
        import obstore

        with _object_errors(self):
            obstore.put(self._store, self.key, data, use_multipart=False)

    def write_blocks(self, blocks: Iterator[bytes]) -> None:
        """Create the object from ``blocks``, or replace it; it appears whole, after the last block."""
        import obstore

        with _object_errors(self):
            obstore.put(self._store, self.key, blocks)

    def create(self, data: bytes) -> bool:
        """Create the object unless it exists; return True if it has the contents ``data`` because of this call.

        The client repeats a request whose response was lost. If the first one was performed, the second one fails
        because the object exists. An object with the same contents is therefore considered created by this call, so
        callers that compete must write different contents, or not mind.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError

        deadline = time.monotonic() + _RETRY_S
        while True:
            with _object_errors(self):
                try:
                    obstore.put(self._store, self.key, data, mode="create")
                except AlreadyExistsError:
                    pass
                else:
                    return True
            try:
                return self.read_bytes() == data
            except FileNotFoundError as error:
                # AWS answers 409 while another request for the object is in progress, which may fail or delete it:
                # obstore does not distinguish this from an object that exists.
                if time.monotonic() >= deadline:
                    raise UnavailableError(
                        f"{str(self)!r} cannot be created",
                        why=f"for {_RETRY_S} s the storage answered that it exists, or is being created: it does not",
                        hint="try again; if it fails again, check the storage",
                    ) from error
            time.sleep(_CONFLICT_PAUSE_S)

    def replace(self, data: bytes, etag: str) -> bool:
        """Replace the version ``etag`` of the object; return False if it has another one, or was removed.

        Repeated requests are treated as in :meth:`create`.
        """
        import obstore
        from obstore.exceptions import PreconditionError

        with _object_errors(self):
            try:
                obstore.put(self._store, self.key, data, mode={"e_tag": etag})
            except (PreconditionError, FileNotFoundError):
                try:
                    return self.read_bytes() == data
                except FileNotFoundError:
                    return False
        return True

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Remove the object. One that does not exist is no error (``missing_ok``, as of S3)."""
        import obstore

        assert missing_ok
        with _object_errors(self):
            obstore.delete(self._store, self.key)

    def remove_tree(self) -> None:
        """Remove all objects below this path."""
        import obstore

        with _object_errors(self):
            for found in obstore.list(self._store, self.key):
                obstore.delete(self._store, [each["path"] for each in found])

    def check_writable(self, whose: str, *, replaces: bool = False) -> None:
        """Check that objects can be created, only once, and deleted here, and leave none.

        ``replaces``: also that an object is replaced only if it has not changed.

        Raises:
            StorageError: they cannot; UnavailableError: the storage does not answer.
        """
        from deltalake.fs import DeltaStorageHandler

        probe = f".{uuid.uuid4().hex[:12]}.tmp"
        try:
            files = _file_system(self.endpoint, self.region, attempts=2)
            with files.open_output_stream(f"{self._place}/{probe}") as file:
                file.write(b"penstock")
            try:
                fault = self._fault_of_conditions(self / probe, replaces=replaces)
            finally:
                # pyarrow would leave an empty object as the directory, and deltalake must have access, too.
                DeltaStorageHandler(str(self), self.options()).delete_file(probe)
        except OSError as error:
            found = object_storage_error(self, error)
            raise StorageError(
                f"{whose}: cannot write to {str(self)!r}", path=str(self), why=found.why, hint=found.hint
            ) from error
        if fault is not None:
            header, why = fault
            raise StorageError(
                f"{whose}: {str(self)!r} is on a storage that does not support {header}",
                path=str(self),
                why=why,
                hint=_CONDITIONAL_WRITES,
            )

    @staticmethod
    def _fault_of_conditions(probe: ObjectPath, *, replaces: bool) -> tuple[str, str] | None:
        """Return the header that the storage does not support for the object ``probe``, and the reason; otherwise None.

        The object exists, so ``If-None-Match`` must be refused, and ``If-Match`` accepted with its version only.
        """
        ignored = "it accepted a request with {} that it must refuse: two runs would overwrite each other"
        if probe.create(b"If-None-Match"):
            return "If-None-Match", ignored.format("If-None-Match")
        if not replaces:
            return None
        if probe.replace(b"If-Match", '"0"'):
            return "If-Match", ignored.format("If-Match")
        if not probe.replace(b"version", probe.stored().etag):
            return "If-Match", "it refused a request with the version that it had returned: nothing could be replaced"
        return None

    @property
    def _store(self) -> S3Store:
        return _object_store(self.bucket, self.endpoint, self.region, os.environ.get("AWS_ACCESS_KEY_ID"))

    @property
    def _place(self) -> str:
        return f"{self.bucket}/{self.key}"


StoragePath = Path | ObjectPath
"""A path in a local or mounted file system, or in a bucket."""
AnyPath = TypeVar("AnyPath", bound=StoragePath)
"""One kind of path."""
_BLOCK_BYTES = 8 << 20


def open_input(path: StoragePath) -> pa.NativeFile:
    """Open a file or an object to read.

    Raises:
        OSError: it does not exist or cannot be read; of an object inside :func:`object_storage_errors`.
    """
    if isinstance(path, ObjectPath):
        return path.open_input()
    import pyarrow as pa

    return pa.OSFile(str(path), mode="r")


def spark_path(path: StoragePath) -> str:
    """Return ``path`` as Spark reads and writes it; in a bucket with the jars of ``s3a``."""
    return f"s3a://{path.bucket}/{path.key}" if isinstance(path, ObjectPath) else str(path)


def absolute_path(path: StoragePath) -> StoragePath:
    """Return ``path`` for processes that may have another working directory, such as Java and Spark's workers."""
    return path if isinstance(path, ObjectPath) else path.absolute()


def is_object_url(path: str) -> bool:
    """Return True if ``path`` is a URL of a bucket, with the scheme ``s3`` or ``s3a``."""
    return path.startswith(("s3://", "s3a://"))


def storage_path(path: str, endpoint: str | None = None, region: str | None = None) -> StoragePath:
    """Return the path that ``path`` names: an URL of a bucket, or a local path.

    Without ``endpoint`` and ``region``, those of the environment are used, as programs of AWS do.

    Raises:
        ConfigError: the URL has no bucket or no key, or the endpoint is not a URL.
    """
    if not is_object_url(path):
        return Path(path)
    match = _URL.fullmatch(path)
    # deltalake reads the key as part of a URL, pyarrow as it is: they would differ for these parts, and for %.
    if match is None or {"", ".", ".."} & set(match["key"].split("/")):
        raise ConfigError(
            f"{_without_credentials(path)!r} is not a path in a bucket",
            option="path",
            hint="set a URL such as s3://bucket/table, without credentials and the characters ?, # and %",
        )
    endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
    if endpoint is not None:
        try:
            endpoint = endpoint_url(endpoint)
        except ValueError:
            raise ConfigError(
                f"{_without_credentials(endpoint)!r} is not the URL of an endpoint",
                option="endpoint",
                hint="set a URL such as http://127.0.0.1:9000, without credentials, or correct AWS_ENDPOINT_URL",
            ) from None
    region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return ObjectPath(match["bucket"], match["key"], endpoint, region)


def endpoint_url(text: str) -> str:
    """Return the URL of an endpoint, without a slash at its end; raises ValueError if ``text`` is none."""
    if _ENDPOINT_URL.fullmatch(text) is None:
        raise ValueError(
            "expected a URL such as https://storage.example.com:9000, without a path and credentials, found "
            f"{_without_credentials(text)!r}"
        )
    return text.rstrip("/")


def _without_credentials(url: str) -> str:
    """Return ``url`` with dots instead of a user's name and password, which errors must not show."""
    return re.sub(r"^(.*?//)?.*@", r"\1...@", url)


_CONNECT_S = 10.0
_REQUEST_S = 30.0
"""Seconds without a byte after which a request fails; by default of AWS 3, which a busy storage exceeds."""


@lru_cache(maxsize=16)
def _file_system(endpoint: str | None, region: str, attempts: int = 3) -> S3FileSystem:
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    parts = urlsplit(endpoint or "https://")
    return S3FileSystem(
        region=region,
        scheme="http" if parts.scheme == "http" else "https",
        endpoint_override=parts.netloc or None,
        connect_timeout=_CONNECT_S,
        request_timeout=_REQUEST_S,
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=attempts),
    )


@lru_cache(maxsize=16)
def _object_store(bucket: str, endpoint: str | None, region: str, _access_key: str | None) -> S3Store:
    """Return a client; ``_access_key`` is its access key, with which it is cached."""
    from obstore.store import S3Store

    config = {"region": region}
    if endpoint is not None:
        # The variable AWS_ENDPOINT_URL_S3 would override the first one.
        config |= {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint}
    return S3Store(
        bucket,
        config=config,  # type: ignore[arg-type]  # a dictionary that is built in steps
        client_options={
            "allow_http": endpoint is not None and endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=_CONNECT_S),
            "timeout": timedelta(seconds=_REQUEST_S),
        },
        # By default ten, which take two seconds if no server listens.
        retry_config={"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_S), "backoff": _BACKOFF},
        credential_provider=_profile(),
    )


_CONFLICT_PAUSE_S = 0.2
_RETRIES = 100
_BACKOFF: BackoffConfig = {
    "init_backoff": timedelta(milliseconds=100),
    "max_backoff": timedelta(seconds=2),
    "base": 2,
}
_OF_OBSTORE = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Variables with credentials that ``obstore`` knows by itself."""


def _profile() -> Boto3CredentialProvider | None:
    """Return the credentials of the files of the AWS command line, if there are any and the environment has none.

    Raises:
        ConfigError: boto3, which reads them, is not installed.
    """
    if any(os.environ.get(name) for name in _OF_OBSTORE):
        return None
    files = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials"
    if not os.environ.get("AWS_PROFILE") and not Path(files).expanduser().is_file() and not _is_configured():
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise ConfigError(
            f"the profile of AWS cannot be read: {error}",
            why="a state directory or dead letters in a bucket need boto3 for AWS_PROFILE and the file of credentials",
            hint="pip install boto3, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ) from error
    return Boto3CredentialProvider()


def _is_configured() -> bool:
    """Return True if the configuration file of the AWS command line has credentials, or a way to get them."""
    file = os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config"
    found = configparser.RawConfigParser(strict=False)
    try:
        found.read(Path(file).expanduser(), encoding="utf-8")
    except (OSError, ValueError, configparser.Error):
        # boto3 would not read it either; the role of the machine may have credentials.
        return False
    return found.has_section("default") and any(found.has_option("default", name) for name in _CREDENTIAL_OPTIONS)


_CREDENTIAL_OPTIONS = (
    "aws_access_key_id",
    "credential_process",
    "login_session",
    "role_arn",
    "sso_session",
    "sso_start_url",
    "web_identity_token_file",
)
"""Options of the default profile in ``~/.aws/config``; one with a region only needs no boto3."""


@contextmanager
def _object_errors(path: ObjectPath) -> Iterator[None]:
    """Translate errors of ``obstore`` inside the block, but FileNotFoundError of an object."""
    from obstore.exceptions import BaseError

    try:
        yield
    except BaseError as error:
        raise object_storage_error(path, error) from error
    except FileNotFoundError as error:
        if _NO_BUCKET not in str(error):
            raise
        raise object_storage_error(path, error) from error


_NO_BUCKET = "NoSuchBucket"
_CONDITIONAL_WRITES = "use a storage with conditional writes, as AWS, MinIO, Ceph and versitygw have"
_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, for the driver and the executors"
_REFUSED = (
    (
        ("NO_SUCH_BUCKET", _NO_BUCKET),
        "the bucket does not exist",
        "create the bucket, or correct the path and the endpoint",
    ),
    (
        ("INVALID_ACCESS_KEY_ID", "InvalidAccessKeyId", "INVALID_CLIENT_TOKEN_ID"),
        "the storage does not know the access key",
        _CREDENTIALS,
    ),
    (
        ("SIGNATURE_DOES_NOT_MATCH", "SignatureDoesNotMatch"),
        "the secret key does not belong to the access key",
        _CREDENTIALS,
    ),
    (("ExpiredToken", "EXPIRED_TOKEN"), "the session token has expired", _CREDENTIALS),
    # The answer contains the token.
    (("InvalidToken",), "the session token is not valid", _CREDENTIALS),
    (
        ("ACCESS_DENIED", "AccessDenied", "403 Forbidden", "necessary privileges"),
        "the credentials do not permit the access, or none were found",
        f"{_CREDENTIALS}; permit s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket",
    ),
    (
        ("301 Moved", "PermanentRedirect", "AuthorizationHeaderMalformed"),
        "the bucket is in another region",
        "set AWS_REGION, or the option region of the table",
    ),
    (
        ("NotImplemented", "501 Not Implemented"),
        "the storage does not support a request, perhaps one with If-None-Match or If-Match",
        _CONDITIONAL_WRITES,
    ),
)
_METADATA = "169.254.169.254"
"""Address of the service of AWS that has the credentials of a machine's role."""
_ENDPOINT = "start the storage, or correct endpoint (AWS_ENDPOINT_URL)"
_REMOVED = "let nothing but the maintenance of penstock remove objects of the table; a run writes its batch again"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m|↳")


def object_storage_error(path: ObjectPath, error: Exception) -> PenstockError:
    """Return the error of penstock for an ``error`` of pyarrow, ``deltalake`` or ``obstore`` about ``path``.

    UnavailableError if it may be temporary, for which a run repeats the batch; otherwise StorageError.
    """
    text = " ".join(_ESCAPES.sub("", str(error)).split())
    what = f"{str(path)!r} cannot be read or written"
    for names, why, hint in _REFUSED:
        if any(name in text for name in names):
            return StorageError(what, path=str(path), why=why, hint=hint)
    if _METADATA in text:
        return StorageError(what, path=str(path), why="no credentials were found", hint=_CREDENTIALS)
    if isinstance(error, FileNotFoundError):
        return UnavailableError(what, why="the object does not exist any more", hint=_REMOVED)
    where = path.endpoint or f"AWS, region {path.region}"
    shown = text.partition(_DEBUG)[0][:_LONGEST]
    return UnavailableError(what, why=f"{where}: {shown}", hint=_ENDPOINT)


_DEBUG = " Debug source:"
"""Begin of what ``obstore`` adds for its developers."""
_LONGEST = 400
"""Maximum length of a cause: errors of ``deltalake`` contain the page of the storage."""


@contextmanager
def object_storage_errors(path: StoragePath) -> Iterator[None]:
    """Translate OSError inside the block to StorageError or UnavailableError, if ``path`` is in a bucket."""
    try:
        yield
    except OSError as error:
        if not isinstance(path, ObjectPath):
            raise
        raise object_storage_error(path, error) from error
