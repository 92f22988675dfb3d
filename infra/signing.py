"""Who signs evidence and whose signatures count: Ed25519 keys in PEM files, DSSE envelopes. Private bytes never leave this module.

Without a configured key a development key is made under <home>/keys on first use. It says so in its file and in every output, and where
SEATRIAL_ALLOW_DEVELOPMENT_KEY is false it neither signs nor counts. Key handling: docs/evidence.md.
"""

import contextlib
import json
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import Error as LibraryError
from securesystemslib.exceptions import UnverifiedSignatureError
from securesystemslib.signer import CryptoSigner, SSlibKey  # type: ignore[attr-defined]  # its __init__ names no exports

from infra.settings import SigningSettings
from validation.canonical import canonical_json
from validation.errors import ConfigError, EvidenceError
from validation.statements import PAYLOAD_TYPE

_MARK = "Sea Trial development key"  # first line of its two files: whoever copies one elsewhere still has a development key
_MAX_BYTES = 64 * 1024  # of a key file
_GENERATE = "Make one with `openssl genpkey -algorithm ed25519 -out key.pem`"


@dataclass(frozen=True, slots=True)
class Signed:
    """An envelope's payload whose signature was verified, and who signed it."""

    payload: bytes
    keyid: str
    is_development: bool


class Signer:
    """A private key that can sign statements; shows its key id, never itself."""

    __slots__ = ("_signer", "is_development", "keyid")

    def __init__(self, key: Ed25519PrivateKey, *, is_development: bool) -> None:
        self._signer = CryptoSigner(key)
        self.keyid: str = self._signer.public_key.keyid
        self.is_development = is_development

    def __repr__(self) -> str:
        return f"Signer({key_words(self.keyid, is_development=self.is_development)})"

    def sign(self, statement: Mapping[str, Any]) -> bytes:
        """A DSSE envelope around a statement, as canonical JSON: the same statement and key give the same bytes."""
        envelope = Envelope(canonical_json(statement), PAYLOAD_TYPE, {})
        envelope.sign(self._signer)
        return canonical_json(envelope.to_dict())


class Keyring:
    """The public keys whose signatures count."""

    def __init__(self, keys: Mapping[str, SSlibKey], *, development: frozenset[str] = frozenset(), refused: frozenset[str] = frozenset()):
        """Args: by key id; development, those among `keys` that are development keys; refused, development keys that must not count."""
        self._keys = dict(keys)
        self._development = development
        self._refused = refused

    @property
    def keyids(self) -> tuple[str, ...]:
        """Ids of the trusted keys, sorted."""
        return tuple(sorted(self._keys))

    def open(self, body: bytes, *, what: str) -> Signed:
        """The payload of a DSSE envelope, its signature verified. Raises EvidenceError that says what is wrong with `what`."""
        envelope = _envelope(body, what)
        (signature,) = envelope.signatures.values()
        key = self._trusted(signature.keyid, what)
        try:
            key.verify_signature(signature, envelope.pae())
        except UnverifiedSignatureError:
            raise EvidenceError(
                f"the signature of {what} by key {signature.keyid[:12]}… does not fit its payload: one of the two was altered after "
                "signing. It proves nothing. Restore it from a backup and find out who can write to the store."
            ) from None
        return Signed(envelope.payload, signature.keyid, signature.keyid in self._development)

    def _trusted(self, keyid: str, what: str) -> SSlibKey:
        if (key := self._keys.get(keyid)) is not None:
            return key
        if keyid in self._refused:
            raise EvidenceError(
                f"{what} is signed by the development key {keyid[:12]}…, which does not count here (SEATRIAL_ALLOW_DEVELOPMENT_KEY is "
                "false). Nothing may serve on its word. Release again with a production key."
            )
        known = ", ".join(f"{name[:12]}…" for name in self.keyids) or "none"
        raise EvidenceError(
            f"{what} is signed by the unknown key {keyid[:12]}… (trusted: {known}). Whoever holds it was never trusted here, or no longer "
            "is. If the key is yours, put its public half (*.pem) into the folder SEATRIAL_TRUSTED_KEYS; otherwise treat it as forged."
        )


def key_words(keyid: str, *, is_development: bool) -> str:
    """A key as every output names it."""
    return f"{'development key' if is_development else 'key'} {keyid[:12]}…"


def load_signer(settings: SigningSettings) -> Signer:
    """The key that signs: the configured one, else the development key, made on first use.

    Raises: ConfigError when the key cannot be used, can be read by others, or is a development key that is not allowed.
    """
    if settings.signing_key is not None:
        return _signer(settings.signing_key, settings)
    if not settings.allow_development_key:
        raise ConfigError(
            "no signing key is configured and development keys are not allowed (SEATRIAL_ALLOW_DEVELOPMENT_KEY is false), so nothing can "
            f"be signed. {_GENERATE}, keep it readable for this user only, and set SEATRIAL_SIGNING_KEY to its path."
        )
    path = development_key(settings)
    try:
        _make_development_key(path)
    except OSError as error:
        raise ConfigError(
            f"the development key {path} cannot be made ({error}). Nothing could be signed, so nothing was started. Set SEATRIAL_HOME to a "
            "folder that this user can write, or SEATRIAL_SIGNING_KEY to a key."
        ) from None
    return _signer(path, settings)


def load_keyring(settings: SigningSettings) -> Keyring:
    """The keys that count: all public keys of the trusted folder, the signing key's own, and the development key where it is allowed.

    Makes no key. Raises: ConfigError when a key file cannot be used, or none is configured where a development key is not allowed.
    """
    found: list[tuple[SSlibKey, bool]] = []
    if settings.trusted_keys is not None:
        found += [_public(path) for path in _trusted_files(settings.trusted_keys)]
    if settings.signing_key is not None:
        key, marked = _private(settings.signing_key)
        found.append((SSlibKey.from_crypto(key.public_key()), marked))
    elif settings.trusted_keys is None and not settings.allow_development_key:
        raise ConfigError(
            "no key is trusted: SEATRIAL_TRUSTED_KEYS and SEATRIAL_SIGNING_KEY are not set and development keys are not allowed, so no "
            "evidence can be verified. Set SEATRIAL_TRUSTED_KEYS to a folder of public keys (*.pem)."
        )
    found += _own_development_key(settings)
    marked_ids = frozenset(key.keyid for key, is_development in found if is_development)
    refused = frozenset() if settings.allow_development_key else marked_ids
    return Keyring({key.keyid: key for key, _ in found if key.keyid not in refused}, development=marked_ids, refused=refused)


def development_key(settings: SigningSettings) -> Path:
    """Where the development key's private half stands; the public half is beside it."""
    return settings.home / "keys" / "development.pem"


def _public_half(path: Path) -> Path:
    return path.with_suffix(".pub.pem")


def _own_development_key(settings: SigningSettings) -> list[tuple[SSlibKey, bool]]:
    """The public half of this home's development key, if there is one."""
    path = development_key(settings)
    if not path.exists() and not _public_half(path).exists():
        return []
    key = SSlibKey.from_crypto(_private(path)[0].public_key()) if path.exists() else _public(_public_half(path))[0]
    return [(key, True)]


def _signer(path: Path, settings: SigningSettings) -> Signer:
    key, is_development = _private(path)
    if is_development and not settings.allow_development_key:
        raise ConfigError(
            f"the signing key {path} is a development key, and these are not allowed (SEATRIAL_ALLOW_DEVELOPMENT_KEY is false). Nothing "
            f"was signed. {_GENERATE} and set SEATRIAL_SIGNING_KEY to its path."
        )
    return Signer(key, is_development=is_development)


def _make_development_key(path: Path) -> None:
    """Put a whole key there unless there is one; of several processes one makes it. Then its public half, likewise."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = Ed25519PrivateKey.generate()
        _create(path, f"{_MARK}, private half\n".encode() + fresh.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    if not (beside := _public_half(path)).exists():
        public = _private(path)[0].public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        _create(beside, f"{_MARK}, public half\n".encode() + public, 0o644)


def _create(path: Path, body: bytes, mode: int) -> None:
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another process was faster: its key is the key
            os.link(fresh, path)  # never shows half a key
    finally:
        fresh.unlink()


def _private(path: Path) -> tuple[Ed25519PrivateKey, bool]:
    """A private key and whether it is a development key. Its text appears in no error."""
    body = _read(path, "signing key", private=True)
    try:
        key = load_pem_private_key(body, password=None)
    except TypeError:
        raise ConfigError(
            f"the signing key {path} is encrypted, so nothing could be signed. Store it without a passphrase, mode 600."
        ) from None
    except Exception as error:  # cryptography raises several kinds; what they quote must not be shown
        raise ConfigError(
            f"the signing key {path} holds no private key in PEM ({type(error).__name__}), so nothing could be signed. {_GENERATE}."
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"the signing key {path} is {_type_words(key)}, but Ed25519 is needed; nothing was signed. {_GENERATE}.")
    return key, _is_marked(body)


def _public(path: Path) -> tuple[SSlibKey, bool]:
    body = _read(path, "trusted key", private=False)
    mend = f"Write it with `openssl pkey -in key.pem -pubout -out {path.name}`, or remove it from the folder."
    try:
        key = load_pem_public_key(body)
    except Exception as error:
        kind = "a private key, which must never lie there" if b"PRIVATE KEY" in body else f"no public key in PEM ({type(error).__name__})"
        raise ConfigError(f"the trusted key {path} holds {kind}. No evidence was verified with it. {mend}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"the trusted key {path} is {_type_words(key)}, but Ed25519 is needed. No evidence was verified with it. {mend}")
    return SSlibKey.from_crypto(key), _is_marked(body)


def _trusted_files(folder: Path) -> list[Path]:
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix == ".pem")
    except OSError as error:
        raise ConfigError(
            f"the folder of trusted keys {folder} cannot be read ({error}), so no evidence can be verified. Correct SEATRIAL_TRUSTED_KEYS."
        ) from None
    if not found:
        raise ConfigError(f"the folder of trusted keys {folder} holds no *.pem, so no evidence can be verified. Put public keys there.")
    return found


def _read(path: Path, what: str, *, private: bool) -> bytes:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a pipe is not waited for
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_BYTES:
                raise ConfigError(f"the {what} {path} is no key file (no regular file, or over 64 KiB). Name a PEM file.")
            if private and stat.S_IMODE(found.st_mode) & 0o077:
                raise ConfigError(
                    f"the {what} {path} can be read or written by others than its owner (mode {stat.S_IMODE(found.st_mode):o}). They could "
                    f"sign releases, so it is not used. Run chmod 600 {path} if they are to be trusted so far; otherwise make a new key."
                )
            return file.read(_MAX_BYTES)
    except OSError as error:
        raise ConfigError(
            f"the {what} {path} cannot be read ({error.strerror}), so nothing was signed or verified. Correct its path and permissions."
        ) from None


def _is_marked(body: bytes) -> bool:
    return body.startswith(_MARK.encode())


def _type_words(key: object) -> str:
    return f"of type {type(key).__name__.removesuffix('PrivateKey').removesuffix('PublicKey').lstrip('_')}"


def _envelope(body: bytes, what: str) -> Envelope:
    """A DSSE envelope of ours from its bytes: one payload type, one signature, nothing else."""
    try:
        found = json.loads(body)
        if set(found) != {"payload", "payloadType", "signatures"} or len(found["signatures"]) != 1:
            raise ValueError("it needs a payload, its type and one signature")
        if found["payloadType"] != PAYLOAD_TYPE:
            raise ValueError(f"its payload type is {str(found['payloadType'])[:80]!r}, not {PAYLOAD_TYPE}")
        return Envelope.from_dict(found)
    except (ValueError, KeyError, TypeError, AttributeError, LibraryError) as error:
        raise EvidenceError(
            f"{what} is no signed DSSE envelope ({type(error).__name__}: {error}). It was altered or was never a signature. Use the sha256 "
            "that the journal or the pointer names, or restore it from a backup."
        ) from None
