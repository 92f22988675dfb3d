"""The release as Prefect sees it: three flows over one order of things (flows/conduct.py), each gate a task on the run's page."""

from functools import partial
from pathlib import Path
from typing import Any, cast

from prefect import flow, get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows import baseline
from flows.approval_form import Question, await_person
from flows.candidate import ensure_candidate
from flows.clock import utc_now
from flows.conduct import Keep, Steps, conduct
from flows.device_slots import slots_held
from flows.embedded_server import at_hand
from flows.finishing import what_is_left
from flows.gates import fresh_bench, hold_gate
from flows.hands import REAL
from flows.orphans import end_orphans
from flows.ownership import Owner, check_owner, flow_run_release, known_entries, owning, remember_flow_run
from flows.pages import show_gate, show_release
from flows.plan import ReleasePlan, ReleaseRequest, make_plan, prepare, request_of
from flows.probes import Bench
from flows.progress import ProgressBar
from flows.promote import make_true
from flows.surroundings import make_ready
from flows.under_way import Candidate, Desk, Release
from infra.attestations import open_notary
from infra.journal import Journal
from infra.markdown import safe
from infra.plots import recall
from infra.pointer import Pointer
from infra.registry import Registry
from infra.report import ReleaseReport
from infra.settings import Settings
from infra.store import ObjectStore, open_store
from validation.errors import RankError, RecipeError, ReleaseError
from validation.policy import GATES
from validation.verdict import Outcome
from validation.waivers import People


@flow(name="release", flow_run_name="release {recipe}", persist_result=False)
def release(recipe: str = "flights", policy: str = "", world_sizes: list[int] | None = None, drill: str = "") -> Any:
    """Hold every gate, then promote the candidate or keep what serves. `policy` is YAML text laid over the default policy.

    A retry of the same flow run goes on with the same release: what passed stays, what failed or is stale is held again.
    """
    settings = make_ready()
    end_orphans(settings, get_run_logger().info)
    store = open_store(settings)
    registry = Registry(settings)  # before anything is written: a registry that does not answer starts no release
    earlier = flow_run_release(store, flow_run_id())
    if earlier and Journal(store, earlier).records():
        return _go_on(settings, store, earlier, keep=_keep_of(Journal(store, earlier)))
    request = ReleaseRequest(recipe=recipe, policy_text=policy, world_sizes=tuple(world_sizes or ()), drill=drill)
    plan = make_plan(request, settings, release_id=earlier)
    remember_flow_run(store, flow_run_id(), plan.release_id)
    journal = Journal(store, plan.release_id)
    with slots_held(plan.model), owning(store, plan.release_id, flow_run_id=flow_run_id()) as owner:
        started = {
            "request": request,
            "model": plan.model,
            "digests": plan.digests,
            "machine": plan.machine,
            "prepared_s": plan.prepared_s,
            **_run(),
        }
        journal.append("started", started, time_utc=utc_now())
        made = _under_way(settings, store, registry, plan, journal, owner)
        return _finished(made, *conduct(made, steps_of_flow(), fresh=frozenset(GATES), keep="none"))


@flow(name="rerun-gate", flow_run_name="rerun {gate} of {release_id}", persist_result=False)
def rerun_gate(gate: str, release_id: str) -> Any:
    """Hold one gate of a release again, and those that are stale or did not pass; then decide again."""
    settings = make_ready()
    end_orphans(settings, get_run_logger().info)
    return _go_on(settings, open_store(settings), release_id, gate=gate)


@flow(name="finish", flow_run_name="finish {release_id}", persist_result=False)
def finish_release(release_id: str) -> Any:
    """Judge what a release has not judged yet, keep everything that still binds, and decide: after a death, or when a person spoke."""
    settings = make_ready()
    end_orphans(settings, get_run_logger().info)
    return _go_on(settings, open_store(settings), release_id, keep="any")


def go_on(release_id: str) -> dict[str, Any]:
    """Run the flow `finish` of a release in this process; returns its document. Raises what stopped it."""
    settings = make_ready()
    store = open_store(settings)
    journal = Journal(store, release_id)
    prepared = prepare(request_of(journal), settings)
    Registry(settings)
    prepared()
    with at_hand():
        state = cast(State[Any], finish_release(release_id, return_state=True))  # not awaitable: no loop runs here
    document = state.result(raise_on_failure=False)
    if not isinstance(document, dict):
        state.result()  # raises the exception that ended the flow
        raise ReleaseError(f"the flow ended as '{state.name}' without a decision. Run `seatrial show {release_id}` to see how far it came.")
    return document


def _go_on(settings: Settings, store: ObjectStore, release_id: str, *, gate: str = "", keep: Keep = "good") -> State[Any]:
    journal, registry = Journal(store, release_id), Registry(settings)
    model = str(known_entries(journal)[0].payload["model"])
    request = request_of(journal, gate)
    with slots_held(model), owning(store, release_id, flow_run_id=flow_run_id()) as owner:
        known_entries(journal)  # it may have been abandoned while nobody owned it
        _end_what_was_begun(settings, store, registry, journal, owner)
        plan = make_plan(request, settings, release_id=release_id)
        recall(plan.folder)
        made = _under_way(settings, store, registry, plan, journal, owner)
        return _finished(made, *conduct(made, steps_of_flow(), fresh=frozenset({gate} if gate else ()), keep=keep))


def _end_what_was_begun(settings: Settings, store: ObjectStore, registry: Registry, journal: Journal, owner: Owner) -> None:
    """Carry out a decision whose process died on the way, before anything is judged anew."""
    if what_is_left(journal.refreshed()) == "effects":
        desk = Desk(
            journal=journal, store=store, notary=open_notary(store, settings), registry=registry,
            folder=Path(settings.home) / "runs" / journal.release_id, say=get_run_logger().info,
            still_mine=partial(check_owner, store, owner),
        )  # fmt: skip
        make_true(desk)


def _under_way(settings: Settings, store: ObjectStore, registry: Registry, plan: ReleasePlan, journal: Journal, owner: Owner) -> Release:
    made = Release(
        plan=plan, store=store, journal=journal, notary=open_notary(store, settings), registry=registry, hands=REAL,
        say=get_run_logger().info,
    )  # fmt: skip
    made.still_mine = partial(check_owner, store, owner)
    return made


def flow_run_id() -> str:
    """The running flow run's; "" outside one."""
    return str(runtime.flow_run.id or "")


def _run() -> dict[str, Any]:
    """The flow run as the journal names it: what was scheduled for when, and when it ran."""
    scheduled = runtime.flow_run.scheduled_start_time
    when = {"scheduled_at": scheduled.isoformat(timespec="seconds")} if scheduled else {}
    return {"flow_run_id": flow_run_id(), **when, "running_at": utc_now()}


def _keep_of(journal: Journal) -> Keep:
    """What a flow run that begins again may keep: everything when a person was waited for; else what passed or was waived."""
    entries = known_entries(journal)
    return "any" if entries[-1].kind in ("approval_requested", "approval") else "good"


def steps_of_flow() -> Steps:
    """Each part as a task of the running flow."""
    bar = ProgressBar("gates", f"0 of {len(GATES)} gates done")

    def came_on(done: int, gate: str) -> None:
        bar.show(100 * done / len(GATES), f"{done} of {len(GATES)} gates done, {gate} last")

    return Steps(gate=_gate, baseline=baseline_task, candidate=candidate_task, came_on=came_on, ask=ask_in_flow)


def ask_in_flow(release: Release, people: People) -> None:
    """Show the form on the flow run's page; by hand, say which command answers."""
    gates = "\n".join(f"- **{gate}**: {line.verdict.outcome}: {safe(line.verdict.reason)}" for gate, line in release.lines.items())
    words = f"May version {release.candidate.version if release.candidate else '?'} of {release.plan.model} serve?\n\n{gates}"
    question = Question(
        journal=release.journal, notary=release.notary, policy=release.plan.policy, basis=people.basis, description=words, say=release.say
    )  # fmt: skip
    await_person(question)


def _gate(release: Release, gate: str) -> None:
    state = gate_task.with_options(name=gate)(release, gate, return_state=True)
    if gate not in release.lines:
        state.result()  # the probe broke in a way that nobody foresaw: raise it


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
def baseline_task(release: Release, run_id: str) -> tuple[Pointer, str]:
    """What serves now; at the first release the named baseline is registered and put in service."""
    try:
        return baseline.ensure_serving(release, run_id)
    except RankError as error:
        raise RecipeError(
            f"the baseline of recipe {release.plan.facts.name} could not be fitted or exported: {error}\nNothing could serve if the "
            "candidate is refused, so the release ended. Mend the recipe's baseline()."
        ) from error


@task(task_run_name="candidate", cache_policy=NO_CACHE)
def candidate_task(release: Release, run_id: str, pointer: Pointer) -> Candidate:
    """Train and register the candidate, or take the one that this release trained before if nothing changed since."""
    release.run_id = run_id
    bar = ProgressBar("candidate-training", "training the candidate")

    def make_bench() -> Bench:
        bench = fresh_bench(release, "candidate")
        bench.watch = bar.show
        return bench

    with release.hands.devices(f"candidate of {release.plan.release_id}", release.say):
        found = ensure_candidate(release, make_bench, pointer)
    bar.show(100.0, f"registered as version {found.version}")
    return found


def _finished(release: Release, document: dict[str, Any], report: ReleaseReport) -> State[Any]:
    """The flow run's end: red unless promoted, so that a refused release is seen in a list of runs."""
    show_release(report, registry_page=release.registry.page(release.plan.model, report.candidate_version))
    if document["decision"] == "promoted":
        return Completed(name="Promoted", message=document["reason"], data=document)
    return Failed(name=document["decision"].replace("_", " ").capitalize(), message=_refusal(document), data=document)


def _refusal(document: dict[str, Any]) -> str:
    """One short sentence for a list of runs; the whole reason stands in the summary artifact and in the report."""
    stopped = [gate["name"] for gate in document["gates"] if gate["outcome"] != Outcome.PASS]
    return f"{', '.join(stopped)} did not pass" if stopped else str(document["reason"])
