"""Keys: made once, read carefully, never shown; envelopes: verified, or refused with the reason."""

import base64
import json
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat, PublicFormat

from infra.settings import Settings, load_settings
from infra.signing import Keyring, development_key, load_keyring, load_signer
from validation.canonical import canonical_json
from validation.errors import ConfigError, EvidenceError

STATEMENT = {"_type": "https://in-toto.io/Statement/v1", "says": "something"}


def pem(key: Ed25519PrivateKey | rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey, password: bytes = b"") -> bytes:
    """A private key as openssl writes it."""
    how = BestAvailableEncryption(password) if password else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how)


def public(key: Ed25519PrivateKey | rsa.RSAPrivateKey) -> bytes:
    """Its public half."""
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def keyfile(path: Path, body: bytes, mode: int = 0o600) -> Path:
    """A key file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    path.chmod(mode)
    return path


def production(tmp_path: Path, **given: object) -> tuple[Settings, Ed25519PrivateKey]:
    """Settings with a production key, and no development keys."""
    key = Ed25519PrivateKey.generate()
    path = keyfile(tmp_path / "secret" / "key.pem", pem(key))
    return load_settings(home=tmp_path / "home", signing_key=path, allow_development_key=False, **given), key


def envelope(settings: Settings) -> dict[str, object]:
    """A signed envelope as plain values."""
    found: dict[str, object] = json.loads(load_signer(settings).sign(STATEMENT))
    return found


def test_a_development_key_is_made_once_and_called_one(tmp_path: Path) -> None:
    """The private half is its owner's alone, the public half lies beside it, and both say what they are."""
    settings = load_settings(home=tmp_path)
    first, second = load_signer(settings), load_signer(settings)
    path = development_key(settings)

    assert (first.keyid, first.is_development) == (second.keyid, True)
    assert "development key" in repr(first)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert sorted(found.name for found in path.parent.iterdir()) == ["development.pem", "development.pub.pem"]
    assert all(found.read_text().startswith("Sea Trial development key") for found in path.parent.iterdir())


def test_processes_that_start_at_once_share_one_key(tmp_path: Path) -> None:
    """Of four processes one makes the key; all sign with it, and nothing half made is left."""
    code = (
        "import sys; from infra.settings import load_settings; from infra.signing import load_signer\n"
        "settings = load_settings(home=sys.argv[1]); sys.stdin.read(1); print(load_signer(settings).keyid)"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    ids = {process.communicate("x", timeout=60)[0].strip() for process in running}

    assert len(ids) == 1
    assert ids != {""}
    assert sorted(found.name for found in (tmp_path / "keys").iterdir()) == ["development.pem", "development.pub.pem"]


def test_the_same_statement_gives_the_same_bytes(tmp_path: Path) -> None:
    """Evidence is addressed by content: signing twice is one object, whatever the order of its fields."""
    signer = load_signer(load_settings(home=tmp_path))
    body = signer.sign(STATEMENT)

    assert body == signer.sign(dict(reversed(STATEMENT.items()))) == canonical_json(json.loads(body))
    assert set(json.loads(body)) == {"payload", "payloadType", "signatures"}


def test_a_signature_verifies(tmp_path: Path) -> None:
    """The payload comes back with the key that signed it."""
    settings, _ = production(tmp_path)
    signer = load_signer(settings)
    found = load_keyring(settings).open(signer.sign(STATEMENT), what="it")

    assert (json.loads(found.payload), found.keyid, found.is_development) == (STATEMENT, signer.keyid, False)


def test_openssl_agrees(tmp_path: Path) -> None:
    """A key made by openssl signs here, and openssl verifies what was signed, as docs/evidence.md shows."""
    key = tmp_path / "key.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(key)], check=True, capture_output=True)
    key.chmod(0o600)
    subprocess.run(["openssl", "pkey", "-in", str(key), "-pubout", "-out", str(tmp_path / "key.pub.pem")], check=True)
    made = json.loads(load_signer(load_settings(home=tmp_path, signing_key=key)).sign(STATEMENT))
    payload, kind = base64.b64decode(made["payload"]), made["payloadType"]
    (tmp_path / "pae").write_bytes(f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload)
    (tmp_path / "sig").write_bytes(base64.b64decode(made["signatures"][0]["sig"]))
    verify = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", "key.pub.pem", "-rawin", "-in", "pae", "-sigfile", "sig"]

    assert b"Successfully" in subprocess.run(verify, cwd=tmp_path, check=True, capture_output=True).stdout


@pytest.mark.parametrize(
    ("body", "mode", "why"),
    [
        (b"", 0o600, "holds no private key in PEM.*openssl genpkey"),
        (b"not a key", 0o600, "holds no private key in PEM.*openssl genpkey"),
        (pem(Ed25519PrivateKey.generate())[:60], 0o600, "holds no private key in PEM.*openssl genpkey"),
        (public(Ed25519PrivateKey.generate()), 0o600, "holds no private key in PEM.*openssl genpkey"),
        (b"x" * 70_000, 0o600, "over 64 KiB"),
        (pem(rsa.generate_private_key(65537, 2048)), 0o600, "of type RSA, but Ed25519 is needed.*openssl genpkey"),
        (pem(ec.generate_private_key(ec.SECP256R1())), 0o600, "but Ed25519 is needed.*openssl genpkey"),
        (pem(Ed25519PrivateKey.generate(), b"secret"), 0o600, "is encrypted.*without a passphrase"),
        (pem(Ed25519PrivateKey.generate()), 0o640, "mode 640.*chmod 600"),
        (pem(Ed25519PrivateKey.generate()), 0o604, "mode 604.*chmod 600"),
        (pem(Ed25519PrivateKey.generate()), 0o620, "mode 620.*chmod 600"),
    ],
    ids=["empty", "text", "cut", "public", "large", "rsa", "ec", "encrypted", "group", "world", "writable"],
)
def test_a_signing_key_that_cannot_be_used_is_refused(tmp_path: Path, body: bytes, mode: int, why: str) -> None:
    """Wrong content, type or permissions: a sentence with the path and the next step, and none of the key."""
    settings = load_settings(home=tmp_path, signing_key=keyfile(tmp_path / "key.pem", body, mode))
    for load in (load_signer, load_keyring):
        with pytest.raises(ConfigError, match=why) as caught:
            load(settings)
        assert b"MC4CAQ" not in str(caught.value).encode()


@pytest.mark.parametrize("what", ["absent", "folder", "pipe"])
def test_a_signing_key_that_is_no_file_is_refused(tmp_path: Path, what: str) -> None:
    """Neither a folder nor a pipe is waited for."""
    path = tmp_path / "key.pem"
    if what == "folder":
        path.mkdir()
    if what == "pipe":
        os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match=r"cannot be read|no key file"):
        load_signer(load_settings(home=tmp_path, signing_key=path))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"nothing", "no public key in PEM"),
        (pem(Ed25519PrivateKey.generate()), "a private key, which must never lie there"),
        (public(rsa.generate_private_key(65537, 2048)), "of type RSA"),
    ],
    ids=["text", "private", "rsa"],
)
def test_a_trusted_key_that_cannot_be_used_is_named(tmp_path: Path, body: bytes, why: str) -> None:
    """One bad file in the folder is an error, never a key that silently does not count."""
    keyfile(tmp_path / "trusted" / "ada.pem", body)
    with pytest.raises(ConfigError, match=f"ada.pem .*{why}.*or remove it"):
        load_keyring(load_settings(home=tmp_path, trusted_keys=tmp_path / "trusted"))


@pytest.mark.parametrize("there", [True, False])
def test_a_trusted_folder_without_keys_is_refused(tmp_path: Path, there: bool) -> None:
    """A mistyped folder must not mean: trust nobody, find out later."""
    if there:
        (tmp_path / "trusted").mkdir()
    with pytest.raises(ConfigError, match=r"Put public keys there|Correct SEATRIAL_TRUSTED_KEYS"):
        load_keyring(load_settings(home=tmp_path, trusted_keys=tmp_path / "trusted"))


def test_production_makes_no_development_key(tmp_path: Path) -> None:
    """Where they are not allowed, nothing signs without a configured key, and no file is made."""
    settings = load_settings(home=tmp_path, allow_development_key=False)
    with pytest.raises(ConfigError, match="set SEATRIAL_SIGNING_KEY"):
        load_signer(settings)
    with pytest.raises(ConfigError, match="Set SEATRIAL_TRUSTED_KEYS"):
        load_keyring(settings)
    assert not (tmp_path / "keys").exists()


def test_a_development_key_stays_one_wherever_it_is_put(tmp_path: Path) -> None:
    """Configured as the signing key, or copied into the trusted folder, it is still refused in production."""
    local = load_settings(home=tmp_path / "home")
    body = load_signer(local).sign(STATEMENT)
    half = development_key(local).with_suffix(".pub.pem").read_bytes()
    keyfile(tmp_path / "trusted" / "copied.pem", half)

    with pytest.raises(ConfigError, match=r"is a development key.*set SEATRIAL_SIGNING_KEY"):
        load_signer(load_settings(home=tmp_path / "home", signing_key=development_key(local), allow_development_key=False))
    strict, _ = production(tmp_path, trusted_keys=tmp_path / "trusted")
    with pytest.raises(EvidenceError, match=r"development key .* does not count here.*Release again with a production key"):
        load_keyring(strict).open(body, what="it")
    allowed = load_settings(home=tmp_path / "elsewhere", trusted_keys=tmp_path / "trusted")
    assert load_keyring(allowed).open(body, what="it").is_development


def test_reading_makes_no_key(tmp_path: Path) -> None:
    """Whoever only verifies leaves no private key behind."""
    assert load_keyring(load_settings(home=tmp_path)).keyids == ()
    assert list(tmp_path.iterdir()) == []


def test_rotation_and_revocation_are_files(tmp_path: Path) -> None:
    """An old key counts as long as its public half lies in the folder."""
    before, old = production(tmp_path / "old")
    body = load_signer(before).sign(STATEMENT)
    trusted = keyfile(tmp_path / "trusted" / "2025.pem", public(old)).parent
    after, new = production(tmp_path / "new", trusted_keys=trusted)

    assert load_keyring(after).open(body, what="it").keyid == load_signer(before).keyid
    (trusted / "2025.pem").unlink()
    keyfile(trusted / "2026.pem", public(new))
    with pytest.raises(EvidenceError, match=r"unknown key .* put its public half"):
        load_keyring(after).open(body, what="it")


def _payload(found: dict[str, object]) -> None:
    found["payload"] = base64.b64encode(b'{"says":"nothing"}').decode()


def _signature(found: dict[str, object]) -> None:
    signature = found["signatures"][0]  # type: ignore[index]
    signature["sig"] = base64.b64encode(bytes(64)).decode()


def _short(found: dict[str, object]) -> None:
    found["signatures"][0]["sig"] = "AAAA"  # type: ignore[index]


def _keyid(found: dict[str, object]) -> None:
    found["signatures"][0]["keyid"] = "0" * 64  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_payload, "does not fit its payload: one of the two was altered"),
        (_signature, "does not fit its payload: one of the two was altered"),
        (_short, "does not fit its payload: one of the two was altered"),
        (_keyid, "unknown key 000000000000"),
        (lambda found: found.update(payloadType="text/plain"), "no signed DSSE envelope.*payload type"),
        (lambda found: found.update(payload="%%%"), "no signed DSSE envelope"),
        (lambda found: found.update(signatures=[]), "no signed DSSE envelope.*one signature"),
        (lambda found: found.update(signatures=[*found["signatures"]] * 2), "no signed DSSE envelope.*one signature"),
        (lambda found: found.update(extra=1), "no signed DSSE envelope"),
        (lambda found: found.pop("payload"), "no signed DSSE envelope"),
        (lambda found: found.update(payload=7), "no signed DSSE envelope"),
    ],
    ids=["payload", "signature", "short", "keyid", "type", "base64", "unsigned", "two", "extra", "missing", "number"],
)
def test_an_altered_envelope_is_refused(tmp_path: Path, change: Callable[[dict[str, object]], object], why: str) -> None:
    """What was altered is said as exactly as it can be known, and what to do."""
    settings, _ = production(tmp_path)
    found = envelope(settings)
    change(found)

    with pytest.raises(EvidenceError, match=f"{why}.*(backup|forged)"):
        load_keyring(settings).open(canonical_json(found), what="it")


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"\xff", b"{}", b"7"], ids=["empty", "list", "null", "binary", "object", "number"])
def test_what_is_no_envelope_is_refused(body: bytes) -> None:
    """Foreign bytes are an EvidenceError."""
    with pytest.raises(EvidenceError, match="no signed DSSE envelope"):
        Keyring({}).open(body, what="it")


def test_the_private_key_is_never_shown(tmp_path: Path) -> None:
    """Neither a signer's repr nor a pickle gives it away."""
    settings, key = production(tmp_path)
    signer = load_signer(settings)
    raw = key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())

    assert repr(signer) == f"Signer(key {signer.keyid[:12]}…)"
    assert raw.hex() not in repr(vars(signer._signer)) + str(settings)
    with pytest.raises(TypeError):
        pickle.dumps(signer)
