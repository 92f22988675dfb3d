"""Objects in an S3 bucket (or a store that speaks S3), with conditional puts: If-None-Match and If-Match."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import boto3
from boto3.s3.transfer import TransferConfig, create_transfer_manager
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError
from botocore.parsers import ResponseParserError

from infra.settings import StoreSettings
from infra.store import ANOTHER_BODY, NOT_THE_SAME, NotFoundError, checked_folder, checked_key, checked_prefix, conflict, not_found
from infra.store_files import CHUNK_BYTES, altered, other_file, receive, stream_sha256, wrong_upload
from validation.canonical import sha256_hex
from validation.errors import ConfigError, StoreError, shown_cause

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

Result = TypeVar("Result")

_LOST = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
_ABSENT = ("NoSuchKey", "404", "NotFound")
_WRITE_ONCE_TRIES = 5  # a 409 says that another conditional write is in flight; it is over within one round trip
_PROBE_KEY = "probe/conditional-writes"


class S3Store:
    """Key = object name below the prefix; etag = S3's own. Each object carries its sha256 and is verified when read."""

    def __init__(self, client: "S3Client", bucket: str, prefix: str = "", *, part_mib: int = 64) -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._where = f"s3://{bucket}/{prefix}".rstrip("/")
        self._part_bytes = part_mib * 2**20
        client.meta.events.register("before-parameter-build.s3.CompleteMultipartUpload", _write_once, unique_id="sea-trial-write-once")

    @classmethod
    def connect(cls, settings: StoreSettings) -> "S3Store":
        """Make a client with the settings' endpoint, region, timeouts and bounded retries; sends nothing yet."""
        bucket, _, prefix = settings.store.removeprefix("s3://").partition("/")
        config = Config(
            connect_timeout=settings.store_connect_timeout_s,
            read_timeout=settings.store_read_timeout_s,
            retries={"mode": "standard", "total_max_attempts": settings.store_attempts},
            s3={"addressing_style": "path"} if settings.store_endpoint else {},  # own endpoints rarely serve bucket.host names
        )
        try:
            session = boto3.session.Session(region_name=settings.store_region)
            client = session.client("s3", endpoint_url=settings.store_endpoint, config=config)
        except (BotoCoreError, ValueError) as error:
            raise ConfigError(
                f"no S3 client for {settings.store} ({error}). Nothing was started. Check SEATRIAL_STORE_ENDPOINT, SEATRIAL_STORE_REGION."
            ) from None
        return cls(client, bucket, prefix, part_mib=settings.store_part_mib)

    def probe(self) -> None:
        """Write one small object and see that conditions are kept. Raises ConfigError or StoreError saying what to do."""
        self.put_new(_PROBE_KEY, b"Sea Trial was here\n")
        for condition in ({"IfNoneMatch": "*"}, {"IfMatch": '"00000000000000000000000000000000"'}):
            if self._put(_PROBE_KEY, b"Sea Trial was here\n", condition) is not None:
                raise StoreError(
                    f"{self._where} ignores conditional writes ({', '.join(condition)}). Two releases could overwrite each other's "
                    "decision, so nothing was started. Use a store that supports If-None-Match and If-Match on PutObject."
                )

    def get(self, key: str) -> bytes:
        return self.get_with_etag(key)[0]

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        def fetch() -> tuple[bytes, str, str]:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._name(key))
            return answer["Body"].read(), answer["ETag"], answer["Metadata"].get("sha256", "")

        body, etag, expected = self._ask(fetch, "read", key)
        if expected and sha256_hex(body) != expected:
            raise altered(self._what(key), sha256_hex(body), expected)
        return body, etag

    def exists(self, key: str) -> bool:
        try:
            self._ask(lambda: self._client.head_object(Bucket=self._bucket, Key=self._name(key))["ETag"], "read", key)
        except NotFoundError:
            return False
        return True

    def folders(self, prefix: str) -> list[str]:
        at = self._prefix + checked_folder(prefix)

        def pages() -> list[str]:
            walk = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=at, Delimiter="/")
            return [item["Prefix"].removeprefix(at).rstrip("/") for page in walk if page["Name"] for item in page.get("CommonPrefixes", [])]

        return sorted(self._ask(pages, "list", prefix))

    def list(self, prefix: str) -> list[str]:
        checked_prefix(prefix)

        def pages() -> list[str]:
            walk = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix + prefix)
            return [item["Key"].removeprefix(self._prefix) for page in walk if page["Name"] for item in page.get("Contents", [])]

        return sorted(self._ask(pages, "list", prefix))

    def put_new(self, key: str, body: bytes) -> None:
        for _ in range(_WRITE_ONCE_TRIES):
            if self._put(key, body, {"IfNoneMatch": "*"}) is not None:
                return
            if self.exists(key):
                break
        # a retried request may have met its own first attempt, so the body decides, not the answer
        if not self.exists(key) or self.get(key) != body:
            raise conflict(key, self._where, ANOTHER_BODY)

    def replace(self, key: str, body: bytes, etag: str | None) -> str:
        token = secrets.token_hex(16)
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        written = self._put(key, body, condition, token)
        if written is None:
            written = self._etag_if_mine(key, token)
        if written is None:
            raise conflict(key, self._where, NOT_THE_SAME)
        return written

    def put_file_new(self, key: str, path: Path, sha256: str) -> None:
        mine = self._send_file(key, path, sha256) if not self.exists(key) else False
        if (found := self._read_back(key)) == sha256:
            return
        if not mine:
            raise other_file(self._what(key))
        self.delete(key)
        raise wrong_upload(self._what(key), path, sha256, found)

    def get_file(self, key: str, path: Path) -> str:
        def fetch() -> str:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._name(key))
            chunks = answer["Body"].iter_chunks(CHUNK_BYTES)
            return receive(chunks, path, what=self._what(key), expected=answer["Metadata"].get("sha256", ""))

        return self._ask(fetch, "read", key)

    def delete(self, key: str) -> None:
        self._ask(lambda: self._client.delete_object(Bucket=self._bucket, Key=self._name(key)), "remove", key)

    def _send_file(self, key: str, path: Path, sha256: str) -> bool:
        """Send a file; False when somebody else was first."""
        if path.stat().st_size < self._part_bytes:
            return self._put(key, path.read_bytes(), {"IfNoneMatch": "*"}) is not None
        self._drop_unfinished(key)
        with path.open("rb"):  # a file that cannot be read is the caller's, not the store's
            pass
        metadata = {"Metadata": {"sha256": sha256}, "ChecksumAlgorithm": "SHA256"}

        def send() -> bool:
            size = self._part_bytes
            try:
                with create_transfer_manager(self._client, TransferConfig(multipart_threshold=size, multipart_chunksize=size)) as manager:
                    manager.upload(str(path), self._bucket, self._name(key), extra_args=metadata).result()
            except ClientError as error:
                if _code(error) in _LOST:
                    return False
                raise
            return True

        return self._ask(send, "write", key)

    def _drop_unfinished(self, key: str) -> None:
        """Parts that a dead writer left cost money and never become an object."""

        def drop() -> None:
            for upload in self._client.list_multipart_uploads(Bucket=self._bucket, Prefix=self._name(key)).get("Uploads", []):
                if upload["Key"] == self._name(key):
                    self._client.abort_multipart_upload(Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"])

        self._ask(drop, "write", key)

    def _read_back(self, key: str) -> str:
        """sha256 of what stands there, whatever its metadata claims: not every store checks what it takes."""

        def read() -> str:
            return stream_sha256(self._client.get_object(Bucket=self._bucket, Key=self._name(key))["Body"].iter_chunks(CHUNK_BYTES))

        return self._ask(read, "read", key)

    def _etag_if_mine(self, key: str, token: str) -> str | None:
        # a lost answer makes the client repeat a write that had won; the token in the metadata tells it from somebody else's
        try:
            answer = self._ask(lambda: self._client.head_object(Bucket=self._bucket, Key=self._name(key)), "read", key)
        except NotFoundError:
            return None
        return answer["ETag"] if answer["Metadata"].get("write") == token else None

    def _put(self, key: str, body: bytes, condition: dict[str, Any], token: str = "") -> str | None:
        def send() -> str | None:
            try:
                answer = self._client.put_object(
                    Bucket=self._bucket, Key=self._name(key), Body=body, ChecksumAlgorithm="SHA256",
                    Metadata={"sha256": sha256_hex(body), "write": token}, **condition,
                )  # fmt: skip
            except ClientError as error:
                if _code(error) in _LOST or ("IfMatch" in condition and _code(error) in _ABSENT):
                    return None
                raise
            return answer["ETag"]

        return self._ask(send, "write", key)

    def _what(self, key: str) -> str:
        return f"'{key}' in {self._where}"

    def _name(self, key: str) -> str:
        return self._prefix + checked_key(key)

    def _ask(self, question: Callable[[], Result], what: str, key: str) -> Result:
        try:
            return question()
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise ConfigError(
                f"no S3 credentials for {self._where} ({error}). Nothing was read or written. Set AWS_PROFILE or AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or give the machine a role."
            ) from None
        except ClientError as error:
            if _code(error) in _ABSENT and what == "read":
                raise not_found(key, self._where) from shown_cause(error)
            raise StoreError(self._refusal(error, what, key)) from shown_cause(error)
        except (BotoCoreError, OSError) as error:
            raise StoreError(
                f"cannot {what} '{key}': {self._where} is not reachable ({error}). A write may or may not have arrived. Check the network "
                "and SEATRIAL_STORE_ENDPOINT, then run the command again: it reads before it writes."
            ) from shown_cause(error)
        except (KeyError, ResponseParserError) as error:  # every answer of a store has its fields, also an empty listing
            raise StoreError(
                f"cannot {what} '{key}': what answered for {self._where} is no S3 store ({type(error).__name__}: {error}). Nothing is "
                "known of the object. Look for a proxy or a sign-in page in the way and check SEATRIAL_STORE_ENDPOINT; then run the "
                "command again."
            ) from None

    def _refusal(self, error: ClientError, what: str, key: str) -> str:
        status, code = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode"), _code(error)
        hint = f"The store answered: {error}. Look up this code in the store's manual, then run the command again."
        if code == "NoSuchBucket":
            hint = f"There is no bucket '{self._bucket}' there. Make it, or correct SEATRIAL_STORE (and SEATRIAL_STORE_REGION)."
        elif status == 403:
            hint = "These credentials may not do that. Grant s3:GetObject, s3:PutObject and s3:ListBucket there, or use others; "
            hint += "a mirror needs s3:DeleteObject, s3:ListBucketMultipartUploads and s3:AbortMultipartUpload too."
        elif status == 301:
            hint = "The bucket is in another region. Correct SEATRIAL_STORE_REGION."
        return f"cannot {what} '{key}' in {self._where} (status {status}, {code}). Nothing was changed. {hint}"


def _write_once(params: dict[str, Any], **_: Any) -> None:
    params["IfNoneMatch"] = "*"  # the managed transfer has no argument for it


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
