"""What serves now: one object a model, changed by compare-and-set. Everything else (aliases, reports) is a view of it."""

import json
import re
from dataclasses import dataclass
from typing import Literal, get_args

from infra.store import NotFoundError, ObjectStore
from validation.canonical import canonical_json
from validation.errors import ConflictError, EvidenceError

ServingKind = Literal["candidate", "last_known_good", "baseline"]

_MODEL = re.compile(r"[a-z0-9][a-z0-9-]{0,199}")  # part of a key
_TEXT = ("model", "serving_version", "last_known_good", "baseline", "release_id", "attestation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """The serving decision in force for one model. Versions are the registry's, as text; "" = there is none."""

    model: str  # the registered model's name
    serving_version: str
    serving_kind: ServingKind  # in what role that version serves
    last_known_good: str  # the verified version to fall back to
    baseline: str  # the version that serves when neither can
    release_id: str  # whose decision this is: a release, or an act such as a rollback
    sequence: int  # 1, 2, 3, ...: how often the pointer has moved
    attestation: str = ""  # sha256 of the signed statement that put this version in service; "" = none, which never verifies


def read_pointer(store: ObjectStore, model: str) -> tuple[Pointer | None, str | None]:
    """What serves now and the etag to move it with; (None, None) before the first decision.

    Raises: EvidenceError when the object is not a pointer of this model.
    """
    try:
        body, etag = store.get_with_etag(pointer_key(model))
    except NotFoundError:
        return None, None
    return _parsed(body, model), etag


def move_pointer(store: ObjectStore, pointer: Pointer, etag: str | None) -> str:
    """Put `pointer` in force if nothing moved since `etag` was read; returns the new etag.

    Raises: ConflictError when another release moved it meanwhile: read it again and decide anew.
    """
    body = canonical_json(pointer)
    _parsed(body, pointer.model)
    return store.replace(pointer_key(pointer.model), body, etag)


def admit(store: ObjectStore, model: str, version: str, attestation: str) -> str:
    """Write down, once, which signed statement let a version serve; returns the one that stands (an earlier one wins)."""
    key = _admission_key(model, version)
    try:
        store.put_new(key, canonical_json({"model": model, "version": version, "attestation": attestation}))
    except ConflictError:
        return admission(store, model, version)
    return attestation


def admission(store: ObjectStore, model: str, version: str) -> str:
    """sha256 of the signed statement that let a version serve; "" = it was never let through."""
    key = _admission_key(model, version)
    try:
        found = json.loads(store.get(key))
        if (found["model"], found["version"]) != (model, version):
            raise ValueError(f"it is of {found['model']} version {found['version']}")
        return str(found["attestation"])
    except NotFoundError:
        return ""
    except (ValueError, KeyError, TypeError) as error:
        raise EvidenceError(
            f"the object {key} does not say what let this version serve ({error}). It cannot be trusted. Restore the object from a "
            "backup, or release again."
        ) from None


def list_pointers(store: ObjectStore) -> tuple[Pointer, ...]:
    """What serves, for every model that has a pointer, by name."""
    return tuple(pointer for model in store.folders("models/") if (pointer := read_pointer(store, model)[0]) is not None)


def pointer_key(model: str) -> str:
    """Where a model's pointer stands."""
    if not _MODEL.fullmatch(model):
        raise EvidenceError(f"{model[:80]!r} is not a model's name ([a-z0-9-]+), so it has no pointer. Use the recipe's name.")
    return f"models/{model}/pointer"


def _admission_key(model: str, version: str) -> str:
    if not version.isdecimal():
        raise EvidenceError(f"{version[:80]!r} is not a version of {model}: versions are whole numbers. `seatrial show` names them.")
    return f"{pointer_key(model).removesuffix('pointer')}admitted/{version}"


def _parsed(body: bytes, model: str) -> Pointer:
    try:
        pointer = Pointer(**json.loads(body))
    except (ValueError, TypeError) as error:
        raise _not_a_pointer(model, str(error)) from None
    if any(not isinstance(getattr(pointer, name), str) for name in _TEXT) or pointer.model != model:
        raise _not_a_pointer(model, f"fields of the wrong type, or of model {pointer.model!r}")
    if pointer.serving_kind not in get_args(ServingKind) or type(pointer.sequence) is not int or pointer.sequence < 1:
        raise _not_a_pointer(model, f"serving_kind {pointer.serving_kind!r}, sequence {pointer.sequence!r}")
    return pointer


def _not_a_pointer(model: str, what: str) -> EvidenceError:
    return EvidenceError(
        f"the object {pointer_key(model)} is not a pointer of {model} ({what}). What serves cannot be told from it. "
        "Write it anew from the last 'decided' record of the model's journals, or restore it from a backup."
    )
