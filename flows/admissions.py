"""Whether a version may serve: what once let it through, read back from the store with every signature and digest verified."""

from dataclasses import dataclass

from flows.proving import prove
from infra.attestations import Attestation, Notary
from infra.pointer import Pointer, admission
from infra.registry import Registry
from infra.store import ObjectStore
from validation.errors import ConfigError, EvidenceError
from validation.statements import BASELINE, DECISION, kind_of, model_subject


class NotAdmittedError(ConfigError):
    """No signed statement ever let this version serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A version that was let through, and everything that says so verified."""

    version: str
    kind: str  # "decision" | "baseline"
    attestation: str  # sha256 of the statement that let it through
    release_id: str
    files_sha256: str  # of the model's files, as signed
    signed_by: str


def verified(notary: Notary, store: ObjectStore, registry: Registry, model: str, version: str) -> Proof:
    """Prove that a version was let through, by evidence that is whole, and that its files are still the ones that were judged.

    Raises: NotAdmittedError when it never was; EvidenceError when something does not verify; StoreError when it cannot be read.
    """
    proof = read_admission(notary, store, model, version)
    registry.version(model, version)  # deleted: says so
    found = registry.files(model, version)
    if found != proof.files_sha256:
        raise EvidenceError(
            f"the files of {model} version {version} have sha256 {found or 'none (there are no files)'}, signed was {proof.files_sha256}. "
            "This is not the model that was judged, so it may not serve. Restore its artifacts from a backup, or name another version."
        )
    return proof


def pointer_problem(notary: Notary, store: ObjectStore, pointer: Pointer) -> str:
    """Why the statement that a pointer names does not put its version in service; "" when it does."""
    try:
        said = prove(notary, store, pointer.attestation)
    except EvidenceError as error:
        return str(error)
    if (said.model, said.version) == (pointer.model, pointer.serving_version) and said.decision in ("", "promoted"):
        return ""
    return f"statement {pointer.attestation} is about {said.model} version {said.version or '(none)'} ({said.decision or said.kind})"


def read_admission(notary: Notary, store: ObjectStore, model: str, version: str) -> Proof:
    """What let a version serve, proven whole: gates, waivers, approval, and the decision made once more (flows/proving.py).

    The version's files are not looked at. Raises as `verified`.
    """
    sha256 = admission(store, model, version)
    if not sha256:
        raise NotAdmittedError(
            f"{model} version {version} was never let through by a release, so it may not serve and nothing was changed. "
            f"Choose one of: {', '.join(admitted_versions(store, model)) or 'none (release first)'}."
        )
    said = notary.read(sha256)
    _demand(said.predicate_type in (DECISION, BASELINE), said, f"it is a {kind_of(said.predicate_type)} statement")
    _demand(said.predicate_type == BASELINE or said.predicate["decision"] == "promoted", said, "its decision promoted nothing")
    named = (said.predicate["model"], said.predicate["version"])
    _demand(named == (model, version), said, f"it is about {named[0]} version {named[1]}")
    prove(notary, store, sha256)
    return Proof(
        version=version, kind=kind_of(said.predicate_type), attestation=sha256, release_id=str(said.predicate["release_id"]),
        files_sha256=said.subjects[model_subject(model, version)], signed_by=said.signed_by,
    )  # fmt: skip


def admitted_versions(store: ObjectStore, model: str) -> tuple[str, ...]:
    """Every version of a model that was ever let through, newest first. Nothing is verified."""
    names = [key.rpartition("/")[2] for key in store.list(f"models/{model}/admitted/")]
    return tuple(sorted((name for name in names if name.isdecimal()), key=int, reverse=True))


def known_models(store: ObjectStore) -> tuple[str, ...]:
    """Every model that has a pointer or an admitted version, by name."""
    return tuple(sorted({parts[1] for key in store.list("models/") if (parts := key.split("/"))[2] in ("pointer", "admitted")}))


def _demand(holds: bool, said: Attestation, problem: str) -> None:
    if not holds:
        raise EvidenceError(
            f"statement {said.sha256} does not show that this version may serve: {problem}. Somebody put it in the place of another. "
            "Restore models/ from a backup of the store, or name another version."
        )
