"""Judge: each gate's probe makes records, its judge reads them, the verdict and the records become evidence."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from flows import drills
from flows.candidate import Candidate, contender_records
from flows.clock import utc_now
from flows.drill_records import on_record
from flows.equivalence_probe import probe_equivalence
from flows.evidence import keep_gate_evidence, verdict_of
from flows.plan import ReleasePlan
from flows.probes import Bench, probe_scaling
from flows.recovery_probe import probe_recovery
from infra.journal import Journal
from infra.report import GateLine
from infra.store import ObjectStore
from validation.canonical import digest
from validation.contract import judge_contract
from validation.equivalence import judge_equivalence
from validation.errors import ConfigError, InputError, RankError, ReleaseError
from validation.expectations import build_contract_records
from validation.policy import GATES
from validation.readiness import judge_readiness
from validation.records import FallbackCheck
from validation.recovery import judge_recovery
from validation.scaling import judge_scaling
from validation.slices import judge_slices
from validation.verdict import GateVerdict, inconclusive

ON_CANDIDATE = ("scaling", "slice_quality")  # gates that judge the trained candidate


class Release:
    """One release under way: the plan, where it writes, and what it knows so far.

    Not a dataclass: Prefect copies the dataclasses that it finds among a task's arguments.
    """

    def __init__(self, *, plan: ReleasePlan, store: ObjectStore, journal: Journal, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.store = store
        self.journal = journal
        self.say = say
        self.lines: dict[str, GateLine] = {}  # gate -> latest line
        self.candidate: Candidate | None = None
        self.fallbacks: tuple[FallbackCheck, ...] = ()
        self.etag: str | None = None  # of the serving pointer when the judging began; None before anything served


def probe_and_judge(release: Release, gate: str, bench: Bench) -> tuple[Any, GateVerdict]:
    """Make a gate's records, and its verdict on them."""
    policy = bench.plan.policy
    match gate:
        case "data_contract":
            frames = {split: pd.read_parquet(path) for split, path in bench.plan.frames.items()}
            contract = build_contract_records(frames, bench.plan.facts.contract)
            return contract, judge_contract(contract)
        case "gradient_equivalence":
            runs = probe_equivalence(bench)
            return runs, judge_equivalence(runs, policy.gradient_equivalence)
        case "kill_and_resume":
            kills = probe_recovery(bench)
            return kills, judge_recovery(kills, policy.kill_and_resume)
        case "scaling":
            points = probe_scaling(bench, _candidate(release).folder)
            return points, judge_scaling(points, policy.scaling)
        case "slice_quality":
            outcomes = contender_records(bench.plan, _candidate(release), bench.folder)
            return outcomes, judge_slices(outcomes, policy.slice_quality)
        case "readiness":
            drilled = drills.probe_readiness(bench, release.lines, release.fallbacks)
            return drilled, judge_readiness(drilled, policy.readiness)
    raise ConfigError(f"there is no gate '{gate}', so nothing was run. Choose one of: {', '.join(GATES)}.")


def _candidate(release: Release) -> Candidate:
    if release.candidate is None:
        raise RankError("there is no trained candidate to judge. Run the release again, or see why its training stopped.")
    return release.candidate


def hold_gate(release: Release, gate: str) -> GateLine:
    """Run one gate: probe, judge, keep the evidence, journal it. A probe that breaks makes the gate inconclusive, never a pass."""
    bench = fresh_bench(release, gate)
    started = time.monotonic()
    try:
        records, verdict = probe_and_judge(release, gate, bench)
    except InputError:
        raise
    except ReleaseError as error:
        again = f"mend the cause, then run `seatrial gate {gate} --release {release.plan.release_id}`"
        records, verdict = None, inconclusive(gate, reason=f"its probe could not be run: {error}", action=again)
    return _keep(release, verdict, records, seconds=time.monotonic() - started, worker_seconds=bench.worker_seconds)


def skip_gate(release: Release, gate: str, because: str) -> GateLine:
    """A gate that was not held: inconclusive, in the evidence like any other."""
    verdict = inconclusive(gate, reason=f"not run: {because}", action="mend what came before it, then release again")
    return _keep(release, verdict, None, seconds=0.0, worker_seconds=0.0)


def fresh_bench(release: Release, gate: str) -> Bench:
    """A bench with a folder of its own for each attempt, so that no attempt reads another's files."""
    base = release.plan.folder / gate
    base.mkdir(exist_ok=True)
    attempt = 1 + len(list(base.iterdir()))
    folder = base / f"attempt-{attempt}"
    folder.mkdir()
    return Bench(plan=release.plan, gate=gate, say=release.say, folder=folder, store=release.store)


def attempts(journal: Journal, gate: str) -> list[Mapping[str, Any]]:
    """The journal's payloads of a gate, oldest first."""
    return [entry.payload for entry in journal.records() if entry.kind == "gate" and entry.payload["gate"] == gate]


def _keep(release: Release, verdict: GateVerdict, records: Any, *, seconds: float, worker_seconds: float) -> GateLine:
    """Evidence first, then the journal entry that points to it."""
    now, attempt = utc_now(), 1 + len(attempts(release.journal, verdict.gate))
    sha256 = keep_gate_evidence(
        release.store, verdict, records, release_id=release.plan.release_id, attempt=attempt, digests=binding(release, verdict.gate),
        seconds=seconds, worker_seconds=worker_seconds, made_at=now,
    )  # fmt: skip
    release.journal.append(
        "gate",
        {"gate": verdict.gate, "attempt": attempt, "outcome": verdict.outcome, "reason": verdict.reason, "evidence": sha256},
        time_utc=now,
    )
    line = GateLine(
        verdict=verdict,
        attempt=attempt,
        reused=False,
        reuse_reason="",
        seconds=seconds,
        worker_seconds=worker_seconds,
        evidence_sha256=sha256,
    )
    release.lines[verdict.gate] = line
    release.say(f"{verdict.gate}: {verdict.outcome.upper()} in {seconds:.1f} s: {verdict.reason}")
    return line


def binding(release: Release, gate: str) -> dict[str, str]:
    """Digests of everything that a gate's verdict depends on; any change makes the verdict stale."""
    digests = dict(release.plan.digests)
    if gate in ON_CANDIDATE and release.candidate is not None:
        digests["candidate"] = release.candidate.weights_sha256
    if gate == "slice_quality" and release.candidate is not None:
        digests["last_known_good"] = digest(release.candidate.last_known_good_uri)
    if gate == "readiness":
        digests["fallbacks"] = digest([(item.kind, item.version) for item in release.fallbacks])
        digests["drills"] = digest([(item.name, item.made_at) for item in on_record(release.plan.home)])
    return digests


def reusable(release: Release, gate: str) -> tuple[GateLine | None, str]:
    """The gate's latest evidence if every digest still matches, and why or why not. A verdict that did not pass is kept as it is."""
    entries = attempts(release.journal, gate)
    if not entries:
        return None, "it was never judged"
    verdict, document = verdict_of(release.store, entries[-1]["evidence"])
    wanted, attempt = binding(release, gate), document["attempt"]
    changed = sorted(name for name in wanted.keys() | document["digests"].keys() if document["digests"].get(name) != wanted.get(name))
    if changed:
        return None, f"stale: {', '.join(changed)} changed since attempt {attempt}"
    why = f"attempt {attempt} is {verdict.outcome} and the digests of {', '.join(wanted)} all match"
    line = GateLine(
        verdict=verdict,
        attempt=attempt,
        reused=True,
        reuse_reason=why,
        seconds=document["seconds"],
        worker_seconds=document["worker_seconds"],
        evidence_sha256=entries[-1]["evidence"],
    )
    return line, why
