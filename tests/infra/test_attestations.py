"""Signed statements in a store: kept once, read back verified, refused when they are something else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers_stores import KINDS

from infra.attestations import Notary, open_notary, open_reader
from infra.settings import load_settings
from infra.signing import load_keyring
from infra.store import MemoryStore, ObjectStore, evidence_key, put_blob
from validation.errors import ConfigError, EvidenceError
from validation.statements import DECISION, GATE, WAIVER

EVIDENCE = "e" * 64
SAID: Mapping[str, Any] = {
    "release_id": "flights-20260131-181542-3f9c", "gate": "scaling", "attempt": 1, "outcome": "pass", "evidence": EVIDENCE,
    "digests": {"code": "c"}, "made_at": "2026-01-31T18:15:42+00:00",
}  # fmt: skip


def attested(notary: Notary, **changed: Any) -> str:
    """A signed gate; returns its sha256."""
    return notary.attest(GATE, {"evidence": EVIDENCE}, {**SAID, **changed})


@pytest.mark.parametrize("store", KINDS, indirect=True)
def test_a_statement_comes_back_as_it_was(store: ObjectStore, tmp_path: Path) -> None:
    """Type, subjects and predicate, and who signed; the same statement again is the same object."""
    notary = open_notary(store, load_settings(home=tmp_path / "keys at home"))
    sha256 = attested(notary)
    found = notary.read(sha256, GATE)

    assert (found.sha256, found.predicate_type, found.subjects, found.predicate) == (sha256, GATE, {"evidence": EVIDENCE}, SAID)
    assert found.signed_by == notary.signs_as == f"development key {found.keyid[:12]}…"
    assert attested(notary) == sha256
    assert store.list("evidence/") == [evidence_key(sha256)]


def test_a_statement_of_another_type_is_refused(tmp_path: Path) -> None:
    """A gate's signature is not a decision's."""
    notary = open_notary(MemoryStore(), load_settings(home=tmp_path))
    with pytest.raises(EvidenceError, match=r"is a gate statement, but a decision statement .* Use the sha256"):
        notary.read(attested(notary), DECISION)


def test_a_signed_payload_that_is_no_statement_is_refused(tmp_path: Path) -> None:
    """A trusted key may have signed something else."""
    store = MemoryStore()
    notary = open_notary(store, load_settings(home=tmp_path))
    assert notary._signer is not None
    sha256 = put_blob(store, notary._signer.sign({"hello": "world"}))

    with pytest.raises(EvidenceError, match=r"no in-toto statement v1 .* Use the sha256"):
        notary.read(sha256)


def test_altered_bytes_are_refused(tmp_path: Path) -> None:
    """One changed byte under the same key."""
    store = MemoryStore()
    notary = open_notary(store, load_settings(home=tmp_path))
    key = evidence_key(attested(notary))
    body, etag = store.get_with_etag(key)
    store.replace(key, body.replace(b"a", b"b", 1), etag)

    with pytest.raises(EvidenceError, match=r"was altered.*Restore the object"):
        notary.read(key.rpartition("/")[2])


def test_what_was_never_kept_is_refused(tmp_path: Path) -> None:
    """An unknown digest, and what is no digest at all."""
    notary = open_notary(MemoryStore(), load_settings(home=tmp_path))
    with pytest.raises(EvidenceError, match="is not in the store"):
        notary.read("0" * 64)
    with pytest.raises(EvidenceError, match="is not a sha256"):
        notary.read("")


def test_a_statement_that_says_too_little_is_not_signed(tmp_path: Path) -> None:
    """Nothing is kept of it."""
    store = MemoryStore()
    with pytest.raises(EvidenceError, match="attempt"):
        attested(open_notary(store, load_settings(home=tmp_path)), attempt=0)

    assert store.list("") == []


def test_a_reader_needs_no_private_key_and_signs_nothing(tmp_path: Path) -> None:
    """It verifies with the public half alone."""
    store, settings = MemoryStore(), load_settings(home=tmp_path)
    sha256 = attested(open_notary(store, settings))
    (tmp_path / "keys" / "development.pem").unlink()
    reader = open_reader(store, settings)

    assert reader.read(sha256, GATE).is_development
    assert reader.signs_as == ""
    with pytest.raises(ConfigError, match="SEATRIAL_SIGNING_KEY"):
        attested(reader)


def test_another_installation_does_not_trust_it(tmp_path: Path) -> None:
    """Each home has a development key of its own."""
    store = MemoryStore()
    sha256 = attested(open_notary(store, load_settings(home=tmp_path / "a")))
    other = open_notary(store, load_settings(home=tmp_path / "b"))

    with pytest.raises(EvidenceError, match=r"unknown key .* put its public half"):
        other.read(sha256)
    assert load_keyring(load_settings(home=tmp_path / "b")).keyids
    assert WAIVER != GATE
