"""What serves a model and by whose word, read from pointer, admissions and journals, every signature verified."""

from dataclasses import dataclass
from typing import Any

from flows.admissions import Proof, read_admission
from flows.plan import ReleaseRequest
from flows.serving import Contender
from infra.attestations import Notary
from infra.export import version_uri
from infra.journal import Journal
from infra.pointer import Pointer, read_pointer
from infra.store import ObjectStore
from validation.errors import ConfigError, EvidenceError
from validation.policy import Policy, parse_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """A version that would take over."""

    proof: Proof
    kind: str  # "last_known_good" | "baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class InService:
    """The version in service, and what its release was asked for."""

    pointer: Pointer
    proof: Proof
    request: ReleaseRequest  # of the release that let it through
    policy: Policy  # of that release
    fallbacks: tuple[Fallback, ...]  # verified, in the order in which they would take over; () = it is the last one

    @property
    def model(self) -> str:
        return self.pointer.model

    @property
    def version(self) -> str:
        return self.pointer.serving_version

    @property
    def serving(self) -> Contender:
        """The version as the warm process asks it."""
        return contender(self.model, self.proof)

    @property
    def reference(self) -> Contender | None:
        """The first fallback, which is asked the same in the shadow."""
        return contender(self.model, self.fallbacks[0].proof) if self.fallbacks else None

    @property
    def reference_version(self) -> str:
        return self.fallbacks[0].proof.version if self.fallbacks else ""


def what_serves(store: ObjectStore, notary: Notary, model: str) -> InService:
    """The version in service. A fallback that does not verify may never serve, and so is none.

    Raises: ConfigError when nothing serves; EvidenceError when what let the version serve does not verify.
    """
    pointer, _ = read_pointer(store, model)
    if pointer is None:
        raise ConfigError(f"nothing serves for model '{model}', so nothing was done. `seatrial show` names the models that serve.")
    proof = read_admission(notary, store, model, pointer.serving_version)
    request = _request(store, proof)
    return InService(
        pointer=pointer, proof=proof, request=request, policy=parse_policy(request.policy_text or None, name="the release's policy"),
        fallbacks=_fallbacks(store, notary, pointer),
    )  # fmt: skip


def contender(model: str, proof: Proof) -> Contender:
    """A verified version as the warm process asks it."""
    return Contender(version=proof.version, uri=version_uri(model, proof.version), sha256=proof.files_sha256)


def _fallbacks(store: ObjectStore, notary: Notary, pointer: Pointer) -> tuple[Fallback, ...]:
    wanted = {pointer.baseline: "baseline", pointer.last_known_good: "last_known_good"}  # a baseline is called last known-good by nobody
    order = [version for version in dict.fromkeys((pointer.last_known_good, pointer.baseline)) if version]
    found = []
    for version in order:
        if version == pointer.serving_version:
            continue
        try:
            found.append(Fallback(proof=read_admission(notary, store, pointer.model, version), kind=wanted[version]))
        except (EvidenceError, ConfigError):
            continue
    return tuple(found)


def _request(store: ObjectStore, proof: Proof) -> ReleaseRequest:
    started = Journal(store, proof.release_id).latest("started")
    if started is None:
        raise EvidenceError(
            f"version {proof.version} was let through by release {proof.release_id}, whose journal is gone. Its recipe and policy are not "
            "known. Restore releases/ from a backup of the store, or roll back to another version."
        )
    given: dict[str, Any] = started.payload["request"]
    return ReleaseRequest(**{**given, "world_sizes": tuple(given["world_sizes"])})
