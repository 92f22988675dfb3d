"""A checkpoint's manifest: which files it has, of which step and run, signed for with a key. Pure; no torch, no files.

    MANIFEST.json = canonical JSON of {format, run, step, files: {name: {bytes, sha256}}, hmac}

`hmac` is HMAC-SHA256 over the canonical JSON of all the rest. Nothing in a manifest is believed before its MAC fits, and nothing that it
lists is read before its sha256 fits: the pickle among a checkpoint's files is never opened on a stranger's word.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from validation.canonical import canonical_json, plain
from validation.errors import DataError

MANIFEST = "MANIFEST.json"
FORMAT = 2
MAC = "hmac"

_NAME = re.compile(r"\.?[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class OtherRunError(DataError):
    """The checkpoint is whole, and another run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSeal:
    """What was written to one file."""

    bytes: int
    sha256: str  # 64 hex digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint is and has; the manifest itself is not among its files."""

    step: int
    run: Mapping[str, Any]  # JSON types: what tells this run from another one (recipe, seed, ...)
    files: Mapping[str, FileSeal]


def build_manifest(manifest: Manifest, key: bytes) -> bytes:
    """The bytes of MANIFEST.json. Raises DataError for a name that is not that of a plain file in the checkpoint's own folder."""
    for name in manifest.files:
        _check_name(name)
    return sign({"format": FORMAT, "run": manifest.run, "step": manifest.step, "files": manifest.files}, key)


def parse_manifest(body: bytes, key: bytes) -> Manifest:
    """Authenticate a manifest and read it. Raises DataError saying how it is damaged."""
    core = authenticate(body, key, name=MANIFEST)
    if core.get("format") != FORMAT:
        raise DataError(f"{MANIFEST} is of format {core.get('format')!r}, and this version reads format {FORMAT}")
    try:
        files = {name: FileSeal(bytes=int(entry["bytes"]), sha256=str(entry["sha256"])) for name, entry in core["files"].items()}
        manifest = Manifest(step=int(core["step"]), run=dict(core["run"]), files=files)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{MANIFEST} is signed and yet no manifest ({type(error).__name__}: {error})") from None
    for name, seal in files.items():
        _check_name(name)
        if not _SHA256.fullmatch(seal.sha256) or seal.bytes < 0:
            raise DataError(f"{MANIFEST} is signed and yet has no size and sha256 of {name}")
    return manifest


def sign(core: Mapping[str, Any], key: bytes) -> bytes:
    """Canonical JSON of `core` and its MAC."""
    return canonical_json({**core, MAC: _mac(core, key)})


def authenticate(body: bytes, key: bytes, *, name: str) -> dict[str, Any]:
    """The signed values of the file `name`, without the MAC. Raises DataError when a single byte is not as it was signed."""
    if not body:
        raise DataError(f"{name} is empty")
    try:
        core = json.loads(body)
        claimed = core.pop(MAC)
        whole = body == canonical_json({**core, MAC: claimed})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{name} is torn or altered: it is not signed JSON ({type(error).__name__})") from None
    if not whole or not isinstance(claimed, str) or not hmac.compare_digest(claimed.encode(), _mac(core, key).encode()):
        raise DataError(f"{name} was altered, or sealed with another key: its MAC does not fit")
    return core  # type: ignore[no-any-return]  # a dict: it had a MAC to pop


def check_identity(manifest: Manifest, *, step: int | None = None, run: Mapping[str, Any] | None = None) -> None:
    """Hold a manifest against where it was found. Raises DataError for another step, OtherRunError for another run."""
    if step is not None and manifest.step != step:
        raise DataError(f"{MANIFEST} belongs to step {manifest.step}, not to step {step}")
    wanted = manifest.run if run is None else plain(run)
    for name in sorted(wanted.keys() | manifest.run.keys()):
        if manifest.run.get(name) != wanted.get(name):
            raise OtherRunError(f"{MANIFEST} belongs to another run: {name} is {manifest.run.get(name)!r}, not {wanted.get(name)!r}")


def check_sizes(manifest: Manifest, sizes: Mapping[str, int]) -> None:
    """Hold a folder's files (name -> bytes, the manifest left out) against the manifest. Raises DataError naming the first that differs."""
    for name in sorted(manifest.files.keys() | sizes.keys()):
        if name not in sizes:
            raise DataError(f"{name} is missing")
        if name not in manifest.files:
            raise DataError(f"{name} is extra: nobody signed for it")
        found, sealed = sizes[name], manifest.files[name].bytes
        if found != sealed:
            raise DataError(f"{name} is {'truncated' if found < sealed else 'too long'}: it has {found} bytes, {sealed} were sealed")


def check_sha256(manifest: Manifest, name: str, found: str) -> None:
    """Hold one file's sha256 against the manifest. Raises DataError when its bytes are others."""
    sealed = manifest.files[name].sha256
    if not hmac.compare_digest(found, sealed):
        raise DataError(f"{name} was altered: it has sha256 {found[:12]}…, {sealed[:12]}… was sealed")


def verify_manifest(
    body: bytes,
    key: bytes,
    *,
    sizes: Mapping[str, int],
    sha256: Mapping[str, str],
    step: int | None = None,
    run: Mapping[str, Any] | None = None,
) -> Manifest:
    """All checks at once: of a folder, or of what was fetched from a store.

    Args: body, of MANIFEST.json; sizes and sha256, of every other file by name.
    Raises: DataError naming the first file that is not as it was sealed, and how.
    """
    manifest = parse_manifest(body, key)
    check_identity(manifest, step=step, run=run)
    check_sizes(manifest, sizes)
    for name in sorted(manifest.files):
        check_sha256(manifest, name, sha256[name])
    return manifest


def _mac(core: Mapping[str, Any], key: bytes) -> str:
    return hmac.new(key, canonical_json(core), hashlib.sha256).hexdigest()


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name == MANIFEST:
        raise DataError(f"{MANIFEST} names '{name[:80]}', which is no plain file of a checkpoint's folder")
