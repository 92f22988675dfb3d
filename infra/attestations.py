"""Signed statements in the store: made, kept as evidence under their sha256, and read back only when their signature verifies."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infra.settings import SigningSettings
from infra.signing import Keyring, Signer, key_words, load_keyring, load_signer
from infra.store import ObjectStore, get_blob, put_blob
from validation.errors import ConfigError, EvidenceError
from validation.statements import kind_of, parse_statement, statement


@dataclass(frozen=True, slots=True, kw_only=True)
class Attestation:
    """A statement whose signature was verified with a trusted key."""

    sha256: str  # of the envelope
    predicate_type: str
    subjects: Mapping[str, str]  # name -> sha256
    predicate: Mapping[str, Any]
    keyid: str
    is_development: bool

    @property
    def signed_by(self) -> str:
        """The key in words, e.g. "development key 20ad60e850a0…"."""
        return key_words(self.keyid, is_development=self.is_development)


class Notary:
    """Signs statements and keeps them; reads them back verified."""

    def __init__(self, store: ObjectStore, signer: Signer | None, keyring: Keyring) -> None:
        """Args: signer: None for whoever only verifies."""
        self._store = store
        self._signer = signer
        self._keyring = keyring

    @property
    def signs_as(self) -> str:
        """The signing key in words; "" for a notary that only reads."""
        return "" if self._signer is None else key_words(self._signer.keyid, is_development=self._signer.is_development)

    def attest(self, predicate_type: str, subjects: Mapping[str, str], predicate: Mapping[str, Any]) -> str:
        """Sign a statement and keep it; returns the sha256 of its envelope. The same statement again is the same object.

        Raises: EvidenceError when the statement lacks what its type has to say (validation/statements.py).
        """
        if self._signer is None:
            raise ConfigError("this process only verifies, so nothing was signed. Open it with a signing key (SEATRIAL_SIGNING_KEY).")
        return put_blob(self._store, self._signer.sign(statement(predicate_type, subjects, predicate)))

    def read(self, sha256: str, predicate_type: str = "") -> Attestation:
        """A kept statement. Args: predicate_type: what it has to be; "" = any.

        Raises: EvidenceError when it is absent or altered, its key is not trusted, or it is of another type.
        """
        signed = self._keyring.open(get_blob(self._store, sha256), what=f"statement {sha256[:12]}…")
        found = parse_statement(signed.payload)
        if predicate_type not in ("", found.predicate_type):
            raise EvidenceError(
                f"statement {sha256} is a {kind_of(found.predicate_type)} statement, but a {kind_of(predicate_type)} statement has to "
                "stand there. It proves something else. Use the sha256 that the journal names for it."
            )
        return Attestation(
            sha256=sha256, predicate_type=found.predicate_type, subjects=found.subjects, predicate=found.predicate,
            keyid=signed.keyid, is_development=signed.is_development,
        )  # fmt: skip


def open_notary(store: ObjectStore, settings: SigningSettings) -> Notary:
    """A notary that signs and verifies as the settings say; makes the development key on first use. Raises ConfigError for bad keys."""
    signer = load_signer(settings)
    return Notary(store, signer, load_keyring(settings))


def open_reader(store: ObjectStore, settings: SigningSettings) -> Notary:
    """A notary that only verifies: it needs no private key and makes none."""
    return Notary(store, None, load_keyring(settings))
