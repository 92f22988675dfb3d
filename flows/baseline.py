"""What serves while a release is judged: the pointer as it stands; at a model's first release the named baseline is put in service."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from flows.admissions import admitted_versions, read_admission
from flows.candidate import registered_once
from flows.clock import utc_now
from flows.effects import carry_out
from flows.under_way import Release
from infra.pointer import Pointer, admit, move_pointer, pointer_key, read_pointer
from infra.registry import mirror_current
from validation.errors import ConflictError, EvidenceError
from validation.statements import BASELINE, model_subject


def ensure_serving(release: Release, run_id: str) -> tuple[Pointer, str]:
    """What serves now and the etag to move it with.

    The registry's aliases are mended on the way, should an earlier release have died before they followed the pointer.
    """
    release.run_id = run_id
    pointer, etag = read_pointer(release.store, release.plan.model)
    if pointer is None or etag is None:
        _demand_nothing_served(release)
        pointer, etag = _first(release)
    else:
        _end_what_was_begun(release)
    mirror_current(release.registry, release.store, release.plan.model)
    return pointer, etag


def _demand_nothing_served(release: Release) -> None:
    """Raise EvidenceError when a candidate served before: its pointer was lost, and is not made up anew."""
    model = release.plan.model
    for version in admitted_versions(release.store, model):
        if read_admission(release.notary, release.store, model, version).kind == "decision":
            raise EvidenceError(
                f"version {version} of {model} was promoted once, but the pointer {pointer_key(model)} is gone. What serves is not known, "
                f"so nothing was judged. Restore the pointer from a backup, or name a version: seatrial rollback {model} --to {version} "
                "--reason ..."
            )


def _end_what_was_begun(release: Release) -> None:
    """A process that died while it put a baseline in service may have been overtaken: its version is not left without a word."""
    for entry in release.journal.refreshed():
        if entry.kind == "intent" and entry.payload["effect"] == "serve_baseline":
            _serve(release, entry.payload["of"], entry.payload["plan"])


def _first(release: Release) -> tuple[Pointer, str]:
    """Register the baseline, sign for it, put it in service; another first release may be faster, which is as good."""
    model = release.plan.model
    made = registered_once(release, "baseline", release.plan.digests["data"], None)
    version = made["version"]
    signed = _signed(release, version, made["files_sha256"])
    first = Pointer(
        model=model, serving_version=version, serving_kind="baseline", last_known_good="", baseline=version,
        release_id=release.plan.release_id, sequence=1, attestation=signed,
    )  # fmt: skip

    _serve(release, version, {"pointer": asdict(first)})
    pointer, etag = read_pointer(release.store, model)
    if pointer is None or etag is None:
        raise ConflictError(f"the pointer of {model} is gone although it was just written. Look into who can write to the store.")
    return pointer, etag


def _serve(release: Release, version: str, plan: Mapping[str, Any]) -> None:
    """Let a baseline in, point to it unless something serves, and say on its page what it is, once."""
    model = release.plan.model

    def act(plan: Mapping[str, Any]) -> Mapping[str, Any]:
        wanted = Pointer(**plan["pointer"])
        admit(release.store, model, wanted.serving_version, wanted.attestation)
        try:
            move_pointer(release.store, wanted, None)
        except ConflictError:
            there, _ = read_pointer(release.store, model)
            return {"served_by": there.release_id if there else ""}
        return {"served_by": release.plan.release_id}

    carry_out(release.journal, "serve_baseline", version, plan, act)
    if {page.version: page.status for page in release.registry.pages(model)}.get(version) == "":
        release.registry.describe_baseline(model, version, release.plan.facts.card.question)


def _signed(release: Release, version: str, files_sha256: str) -> str:
    said = {"release_id": release.plan.release_id, "model": release.plan.model, "version": version, "digests": release.plan.digests}
    subjects = {model_subject(release.plan.model, version): files_sha256}
    return release.notary.attest(BASELINE, subjects, {**said, "made_at": utc_now()})
