"""The models of a release: the candidate is trained and registered, the baseline is there from the first release on."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from flows.contenders import Scored
from flows.plan import ReleasePlan
from flows.probes import CALL_DEADLINE_S, Bench, train_candidate
from infra import export
from infra.journal import Journal
from infra.pointer import Pointer
from trainer import ranks
from validation.canonical import sha256_hex
from validation.records import FallbackCheck, SliceRecords
from validation.slices import plant


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A trained model that asks to serve, already a version in the registry without any alias."""

    version: str
    run_id: str
    model_uri: str
    folder: Path  # the training run's
    weights_sha256: str
    state_sha256: str
    worker_seconds: float
    baseline_uri: str
    last_known_good_uri: str  # "" when nothing was promoted before


def register_baseline(plan: ReleasePlan, run_id: str) -> str:
    """Fit, log and register the recipe's baseline; returns the version."""
    return _registered(plan, run_id, "baseline", {"recipe": plan.request.recipe}).version


def make_candidate(plan: ReleasePlan, bench: Bench, run_id: str, pointer: Pointer) -> Candidate:
    """Train, then log and register the candidate as a version that serves nobody yet."""
    record, folder = train_candidate(bench)
    weights = folder / "model.safetensors"
    logged = _registered(plan, run_id, "candidate", {"recipe": plan.request.recipe, "weights": str(weights)})
    return Candidate(
        version=logged.version,
        run_id=run_id,
        model_uri=logged.model_uri,
        folder=folder,
        weights_sha256=sha256_hex(weights.read_bytes()),
        state_sha256=record.state_sha256,
        worker_seconds=record.worker_seconds,
        baseline_uri=export.version_uri(plan.model, pointer.baseline),
        last_known_good_uri=last_known_good_uri(plan, pointer),
    )


def _registered(plan: ReleasePlan, run_id: str, artifact: str, arguments: dict[str, str]) -> export.RegisteredVersion:
    logged: export.RegisteredVersion = ranks.call(
        "infra.export:log_model",
        name=plan.model,
        run_id=run_id,
        artifact=artifact,
        builder=f"trainer.scoring:{artifact}_module",
        arguments=arguments,
        example="trainer.scoring:example_inputs",
        example_arguments={"recipe": plan.request.recipe},
        deadline_s=CALL_DEADLINE_S,
    )
    return logged


def last_known_good_uri(plan: ReleasePlan, pointer: Pointer, *, own_version: str = "") -> str:
    """The verified version that a candidate has to be as good as; "" when only the baseline ever served."""
    good = _good_versions(pointer, own_version)
    return export.version_uri(plan.model, good[0]) if good else ""


def _good_versions(pointer: Pointer, own_version: str) -> list[str]:
    """What serves now, then what served before; never the baseline, never the candidate itself."""
    serving = pointer.serving_version if pointer.serving_kind != "baseline" else ""
    return [version for version in dict.fromkeys((serving, pointer.last_known_good)) if version and version != own_version]


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


def contender_records(plan: ReleasePlan, candidate: Candidate, folder: Path) -> SliceRecords:
    """Score candidate, last known-good, baseline (as registered) and the rule on the judge split."""
    uris = {"candidate": candidate.model_uri, "last_known_good": candidate.last_known_good_uri, "baseline": candidate.baseline_uri}
    out = folder / "outcomes.parquet"
    scored: Scored = ranks.call(
        "flows.contenders:score_contenders", plan.request.recipe, {name: uri for name, uri in uris.items() if uri}, str(out),
        deadline_s=CALL_DEADLINE_S,
    )  # fmt: skip
    outcomes = pd.read_parquet(out)
    column = plan.facts.slices[0]
    planted_slice = f"{column}={outcomes[column].value_counts().sort_index().idxmax()}"
    return SliceRecords(
        outcomes=outcomes, slices=plan.facts.slices, contenders=tuple(scored.quality), utility_unit=plan.facts.card.utility_unit,
        quality_name=plan.facts.card.quality_name, quality=scored.quality, target_quality=plan.facts.target_quality,
        planted_slice=planted_slice, planted_outcomes=plant(outcomes, planted_slice), latency_ms=scored.latency_ms,
        latency_machine=f"{plan.machine.device}, one core",
    )  # fmt: skip


def check_fallbacks(plan: ReleasePlan, pointer: Pointer, own_version: str) -> tuple[FallbackCheck, ...]:
    """Load what would serve if the candidate may not, and ask it for a prediction: what serves now first, the baseline last."""
    wanted = [("last_known_good", version) for version in _good_versions(pointer, own_version)]
    return tuple(_checked(plan, kind, version) for kind, version in [*wanted, ("baseline", pointer.baseline)])


def _checked(plan: ReleasePlan, kind: str, version: str) -> FallbackCheck:
    try:
        example = ranks.call("trainer.scoring:example_inputs", plan.request.recipe, deadline_s=CALL_DEADLINE_S)
        ranks.call("infra.export:load_and_predict", export.version_uri(plan.model, version), example, deadline_s=CALL_DEADLINE_S)
    except Exception as error:
        return FallbackCheck(kind=kind, version=version, loaded=False, predicted=False, detail=f"{type(error).__name__}: {error}")
    return FallbackCheck(
        kind=kind, version=version, loaded=True, predicted=True, detail="loaded, and answered with finite scores of the right shape"
    )
