"""The release, in the order in which it happens. Two flows: `release`, and `rerun-gate` for one gate of an earlier release."""

from dataclasses import replace
from functools import partial
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows.candidate import Candidate, candidate_payload, check_fallbacks, find_candidate, last_known_good_uri, make_candidate
from flows.clock import utc_now
from flows.gates import ON_CANDIDATE, Release, fresh_bench, hold_gate, reusable, skip_gate
from flows.pages import show_gate, show_release
from flows.plan import ReleasePlan, ReleaseRequest, make_plan, request_of, take_plan
from flows.progress import ProgressBar
from flows.promote import conclude, ensure_serving
from flows.surroundings import make_ready
from infra.journal import Journal
from infra.pointer import Pointer, read_pointer
from infra.registry import Registry
from infra.store import ObjectStore, open_store
from validation.errors import RankError, RecipeError, ReleaseError
from validation.policy import GATES
from validation.verdict import Outcome


@flow(name="release", flow_run_name="release {recipe}", persist_result=False)
def release(recipe: str = "flights", policy: str = "", world_sizes: list[int] | None = None, drill: str = "") -> Any:
    """Hold every gate, then promote the candidate or keep what serves. `policy` is YAML text laid over the default policy."""
    request = ReleaseRequest(recipe=recipe, policy_text=policy, world_sizes=tuple(world_sizes or ()), drill=drill)
    settings = make_ready()
    store = open_store(settings)
    registry = Registry(settings)  # before anything is written: a registry that does not answer starts no release
    plan = take_plan(request, settings)
    journal = Journal(store, plan.release_id)
    journal.append(
        "started", {"request": request, "model": plan.model, "digests": plan.digests, "machine": plan.machine}, time_utc=utc_now()
    )
    return _conduct(plan, registry, store, journal, fresh=frozenset(GATES))


@flow(name="rerun-gate", flow_run_name="rerun {gate} of {release_id}", persist_result=False)
def rerun_gate(gate: str, release_id: str) -> Any:
    """Hold one gate of a release again, and those whose evidence is stale or did not pass; then decide again."""
    settings = make_ready()
    store = open_store(settings)
    journal = Journal(store, release_id)
    plan = make_plan(request_of(journal, gate), settings, release_id=release_id)
    return _conduct(plan, Registry(settings), store, journal, fresh=frozenset({gate}))


def _conduct(plan: ReleasePlan, registry: Registry, store: ObjectStore, journal: Journal, *, fresh: frozenset[str]) -> State[Any]:
    started_at = utc_now()
    release = Release(plan=plan, store=store, journal=journal, say=get_run_logger().info)
    release.say(f"release {plan.release_id}: {plan.facts.card.question}")
    hold = partial(_gate, release, fresh, ProgressBar("gates", f"0 of {len(GATES)} gates done"))
    if hold("data_contract") is Outcome.PASS:
        run_id = registry.start_run(plan.model, plan.release_id)
        pointer, release.etag = baseline(release, registry, run_id)
        hold("gradient_equivalence")
        hold("kill_and_resume")
        try:
            version = candidate(release, run_id, pointer).version
        except ReleaseError as error:
            version = ""
            for gate in ON_CANDIDATE:
                skip_gate(release, gate, f"the candidate could not be made: {error}")
        else:
            hold("scaling")
            hold("slice_quality")
        release.fallbacks = check_fallbacks(plan, pointer, version)
        hold("readiness")
    else:
        for gate in GATES[1:]:
            skip_gate(release, gate, "data_contract did not pass, and nothing may be trained on inputs that break their contract")
        serving, release.etag = read_pointer(store, plan.model)
        release.fallbacks = check_fallbacks(plan, serving, "") if serving else ()
    return _finished(*conclude(release, registry, started_at))


def _gate(release: Release, fresh: frozenset[str], bar: ProgressBar, gate: str) -> Outcome:
    """Hold a gate, or keep its latest evidence when every digest that binds it still matches."""
    line, why = (None, "asked for") if gate in fresh else reusable(release, gate)
    if line is not None:
        release.lines[gate] = line
        release.say(f"{gate}: kept, {why}")
    else:
        release.say(f"{gate}: running ({why})")
        state = gate_task.with_options(name=gate)(release, gate, return_state=True)
        if gate not in release.lines:
            state.result()  # the probe broke in a way that nobody foresaw: raise it
    bar.show(100 * len(release.lines) / len(GATES), f"{len(release.lines)} of {len(GATES)} gates done, {gate} last")
    return release.lines[gate].verdict.outcome


@task(task_run_name="{gate}", cache_policy=NO_CACHE)
def gate_task(release: Release, gate: str) -> State[Any]:
    """One gate on the flow run's page: green only if it passed. Reuse is decided by digests, never by Prefect's cache."""
    line = hold_gate(release, gate)
    show_gate(line)
    verdict = line.verdict
    if verdict.outcome is Outcome.PASS:
        return Completed(message=verdict.reason)
    return Failed(name=verdict.outcome.capitalize(), message=verdict.reason)


@task(task_run_name="baseline", cache_policy=NO_CACHE)
def baseline(release: Release, registry: Registry, run_id: str) -> tuple[Pointer, str]:
    """What serves now; at the first release the named baseline is registered and put in service."""
    try:
        return ensure_serving(release.plan, release.store, registry, run_id)
    except RankError as error:
        raise RecipeError(
            f"the baseline of recipe {release.plan.facts.name} could not be fitted or exported: {error}\nNothing could serve if the "
            "candidate is refused, so the release ended. Mend the recipe's baseline()."
        ) from error


@task(task_run_name="candidate", cache_policy=NO_CACHE)
def candidate(release: Release, run_id: str, pointer: Pointer) -> Candidate:
    """Train and register the candidate, or take the one that this release trained before if nothing changed since."""
    found, why = find_candidate(release.journal, release.plan.digests)
    if found is None:
        release.say(f"candidate: training ({why})")
        bench, bar = fresh_bench(release, "candidate"), ProgressBar("candidate-training", "training the candidate")
        bench.watch = bar.show
        found = make_candidate(release.plan, bench, run_id, pointer)
        bar.show(100.0, f"trained, and registered as version {found.version}")
    else:
        release.say(f"candidate: reused version {found.version}, {why}")
        found = replace(found, last_known_good_uri=last_known_good_uri(release.plan, pointer, own_version=found.version))
    release.journal.append("candidate", candidate_payload(found, release.plan.digests), time_utc=utc_now())
    release.candidate = found
    return found


def _finished(document: dict[str, Any], report: Any) -> State[Any]:
    """The flow run's end: red unless promoted, so that a refused release is seen in a list of runs."""
    show_release(report)
    if document["decision"] == "promoted":
        return Completed(name="Promoted", message=document["reason"], data=document)
    return Failed(name=document["decision"].replace("_", " ").capitalize(), message=_refusal(document), data=document)


def _refusal(document: dict[str, Any]) -> str:
    """One short sentence for a list of runs; the whole reason stands in the summary artifact and in the report."""
    stopped = [gate["name"] for gate in document["gates"] if gate["outcome"] != Outcome.PASS]
    return f"{', '.join(stopped)} did not pass" if stopped else str(document["reason"])
