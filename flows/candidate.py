"""The models of a release: the candidate is trained and registered, the baseline is there from the first release on."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flows.clock import utc_now
from flows.effects import carry_out
from flows.plan import ReleasePlan
from flows.probes import CALL_DEADLINE_S, Bench, train_candidate
from flows.under_way import Candidate, Release, Trained
from infra import export
from infra.journal import Journal
from infra.pointer import Pointer, admission
from trainer import ranks
from validation.canonical import digest, sha256_hex
from validation.errors import EvidenceError
from validation.records import FallbackCheck


def train(_: Release, bench: Bench) -> Trained:
    """Train the candidate."""
    record, folder = train_candidate(bench)
    weights = sha256_hex((folder / "model.safetensors").read_bytes())
    return Trained(folder=folder, weights_sha256=weights, state_sha256=record.state_sha256, worker_seconds=record.worker_seconds)


def register(plan: ReleasePlan, run_id: str, artifact: str, tags: Mapping[str, str], weights: Path | None) -> export.RegisteredVersion:
    """Export, log and register the candidate of these weights, or the recipe's baseline."""
    logged: export.RegisteredVersion = ranks.call(
        "infra.export:log_model",
        name=plan.model,
        run_id=run_id,
        artifact=artifact,
        builder=f"trainer.scoring:{artifact}_module",
        arguments={"recipe": plan.request.recipe} | ({"weights": str(weights)} if weights else {}),
        example="trainer.scoring:example_inputs",
        example_arguments={"recipe": plan.request.recipe},
        tags=dict(tags),
        deadline_s=CALL_DEADLINE_S,
    )
    return logged


def registered_once(release: Release, artifact: str, of: str, weights: Path | None) -> Mapping[str, Any]:
    """Register a model, journalled: a process that died after it registered leaves nothing to register again."""

    def act(plan: Mapping[str, Any]) -> Mapping[str, Any]:
        tags = {"artifact": artifact, "of": of}
        run_id = plan["run_id"] if release.registry.has_run(plan["run_id"]) else release.run_id  # somebody deleted it meanwhile
        found = release.registry.find_version(release.plan.model, run_id=plan["run_id"], tags=tags)
        made = found or release.hands.register(release.plan, run_id, artifact, tags, weights)
        if admission(release.store, release.plan.model, made.version):
            raise EvidenceError(
                f"the registry gave {release.plan.model} the number {made.version}, but a version {made.version} was let through before: "
                "the registry is not the one of then. The new one cannot be told from it, so it may not serve. Restore the registry from "
                f"a backup; or, to start anew, keep a copy of models/{release.plan.model}/ in the store, remove it and release again."
            )
        return {"version": made.version, "model_uri": made.model_uri, "files_sha256": made.sha256}

    return carry_out(release.journal, f"register_{artifact}", of, {"run_id": release.run_id}, act)


def make_candidate(release: Release, bench: Bench, pointer: Pointer) -> Candidate:
    """Train, then log and register the candidate as a version that serves nobody yet."""
    trained = release.hands.train(release, bench)
    release.still_mine()
    made = registered_once(release, "candidate", trained.weights_sha256, trained.weights)
    return Candidate(
        version=made["version"], run_id=release.run_id, model_uri=made["model_uri"], files_sha256=made["files_sha256"],
        folder=trained.folder, weights_sha256=trained.weights_sha256, state_sha256=trained.state_sha256,
        worker_seconds=trained.worker_seconds, baseline_uri=export.version_uri(release.plan.model, pointer.baseline),
        last_known_good_uri=last_known_good_uri(release.plan, pointer, own_version=made["version"]),
    )  # fmt: skip


def kept_candidate(release: Release, pointer: Pointer) -> tuple[Candidate | None, str]:
    """The candidate that this release trained before, if nothing changed since; else why not."""
    found, why = find_candidate(release.journal, bound_by(release.plan))
    if found is None:
        return None, why
    return replace(found, last_known_good_uri=last_known_good_uri(release.plan, pointer, own_version=found.version)), why


def keep_candidate(release: Release, found: Candidate) -> Candidate:
    """Write the candidate down: with which digests it was trained, and what it is compared with."""
    release.journal.append("candidate", candidate_payload(found, bound_by(release.plan)), time_utc=utc_now())
    release.candidate = found
    return found


def ensure_candidate(release: Release, make_bench: Callable[[], Bench], pointer: Pointer) -> Candidate:
    """The candidate that this release trained before if nothing changed since, else a new one."""
    found, why = kept_candidate(release, pointer)
    if found is None:
        release.say(f"candidate: training ({why})")
        found = make_candidate(release, make_bench(), pointer)
    else:
        release.say(f"candidate: reused version {found.version}, {why}")
    return keep_candidate(release, found)


def last_known_good_uri(plan: ReleasePlan, pointer: Pointer, *, own_version: str = "") -> str:
    """The verified version that a candidate has to be as good as; "" when only the baseline ever served."""
    good = _good_versions(pointer, own_version)
    return export.version_uri(plan.model, good[0]) if good else ""


def _good_versions(pointer: Pointer, own_version: str) -> list[str]:
    """What serves now, then what served before; never the baseline, never the candidate itself."""
    serving = pointer.serving_version if pointer.serving_kind != "baseline" else ""
    return [version for version in dict.fromkeys((serving, pointer.last_known_good)) if version and version != own_version]


def bound_by(plan: ReleasePlan) -> dict[str, str]:
    """Digests of everything that a trained candidate depends on."""
    return {"code": digest(plan.sources["candidate"]), "data": plan.digests["data"], "config": plan.digests["config"]}


def candidate_payload(candidate: Candidate, digests: dict[str, str]) -> dict[str, Any]:
    """The candidate as its journal entry."""
    return {**asdict(candidate), "folder": str(candidate.folder), "digests": digests}


def find_candidate(journal: Journal, digests: dict[str, str]) -> tuple[Candidate | None, str]:
    """The release's latest candidate if every digest matches and its files are unaltered; else why not."""
    entry = journal.latest("candidate")
    if entry is None:
        return None, "no candidate was trained"
    payload = dict(entry.payload)
    changed = [name for name, value in payload.pop("digests").items() if digests.get(name) != value]
    if changed:
        return None, f"{', '.join(changed)} changed since it was trained"
    found = Candidate(**{**payload, "folder": Path(payload["folder"])})
    weights = found.folder / "model.safetensors"
    if not weights.exists() or sha256_hex(weights.read_bytes()) != found.weights_sha256:
        return None, "its weights are gone from this machine or were altered"
    return found, "every digest matches and its weights are unaltered"


def check_fallbacks(plan: ReleasePlan, pointer: Pointer, own_version: str) -> tuple[FallbackCheck, ...]:
    """Load what would serve if the candidate may not, and ask it for a prediction: what serves now first, the baseline last."""
    wanted = [("last_known_good", version) for version in _good_versions(pointer, own_version)] + [("baseline", pointer.baseline)]
    with ThreadPoolExecutor(len(wanted) + 1) as pool:  # each in a process of its own: one that crashes takes no other along
        example = pool.submit(ranks.call, "trainer.scoring:example_inputs", plan.request.recipe, deadline_s=CALL_DEADLINE_S)
        return tuple(pool.map(lambda fallback: _checked(plan, example.result, *fallback), wanted))


def _checked(plan: ReleasePlan, example: Callable[[], Any], kind: str, version: str) -> FallbackCheck:
    try:
        ranks.call("infra.export:load_and_predict", export.version_uri(plan.model, version), example(), deadline_s=CALL_DEADLINE_S)
    except Exception as error:
        return FallbackCheck(kind=kind, version=version, loaded=False, predicted=False, detail=f"{type(error).__name__}: {error}")
    return FallbackCheck(
        kind=kind, version=version, loaded=True, predicted=True, detail="loaded, and answered with finite scores of the right shape"
    )
