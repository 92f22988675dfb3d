"""The order of a release, without any framework: gates, candidate, decision, effects. `flows.release` runs it under Prefect."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from flows.admissions import verified
from flows.baseline import ensure_serving
from flows.candidate import ensure_candidate
from flows.clock import utc_now
from flows.deciding import Ask, nobody_asked, record_decision
from flows.gates import ON_CANDIDATE, fresh_bench, hold_gate, reusable, skip_gate
from flows.people import waivers_of
from flows.promote import make_true
from flows.under_way import Candidate, Release
from infra.pointer import Pointer, read_pointer
from infra.report import ReleaseReport
from validation.errors import ConfigError, ReleaseError, StoreError
from validation.policy import GATES
from validation.records import FallbackCheck
from validation.verdict import Outcome

Keep = Literal["none", "good", "any"]  # which earlier evidence may stand when its digests match: none, passed or waived, whatever it says
Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """How the parts of a release are run: plainly, or each as a task of a flow."""

    gate: Callable[[Release, str], None]  # leaves its line in release.lines
    baseline: Callable[[Release, str], tuple[Pointer, str]]  # release, run id -> what serves and the etag to move it with
    candidate: Callable[[Release, str, Pointer], Candidate]
    came_on: Callable[[int, str], None] = lambda _done, _gate: None  # gates judged, the last one's name
    ask: Ask = nobody_asked  # a person, if the policy wants one


def conduct(release: Release, steps: Steps, *, fresh: frozenset[str] = frozenset(), keep: Keep = "good") -> tuple[Document, ReleaseReport]:
    """Hold the gates, decide, and make the decision true.

    Args: fresh, gates that are held whatever stands in the journal; keep, what may stand of the others.
    Returns: the document that `seatrial release --json` prints, and the report it was made from.
    """
    started_at = utc_now()
    if release.desk.model != release.plan.model:
        raise ConfigError(
            f"recipe {release.plan.request.recipe} is called {release.plan.model} now, but release {release.plan.release_id} is of model "
            f"{release.desk.model}, so nothing was done. Give the recipe its old name back, or release again under the new one."
        )
    release.say(f"release {release.plan.release_id}: {release.plan.facts.card.question}")
    release.waivers = waivers_of(release.journal, release.notary)
    judge_all(release, steps, fresh=fresh, keep=keep)
    record_decision(release, started_at, ask=steps.ask)
    return make_true(release.desk)


def judge_all(release: Release, steps: Steps, *, fresh: frozenset[str], keep: Keep) -> None:
    """Every gate in its order. A data contract that is broken stops what rests on the data; nothing else stops anything."""

    def judged(gate: str) -> Outcome:
        _judge(release, steps, gate, fresh=fresh, keep=keep)
        steps.came_on(len(release.lines), gate)
        return release.lines[gate].verdict.outcome

    if judged("data_contract") is not Outcome.PASS:
        for gate in GATES[1:]:
            skip_gate(release, gate, "data_contract did not pass, and nothing may be trained on inputs that break their contract")
        pointer, release.etag = read_pointer(release.store, release.plan.model)
        release.fallbacks = vouched(release, release.hands.check_fallbacks(release.plan, pointer, "")) if pointer else ()
        return
    release.run_id = release.registry.start_run(release.plan.model, release.plan.release_id)
    pointer, release.etag = steps.baseline(release, release.run_id)
    judged("gradient_equivalence")
    judged("kill_and_resume")
    version = _candidate(release, steps, pointer)
    if version:
        judged("scaling")
        judged("slice_quality")
    release.fallbacks = vouched(release, release.hands.check_fallbacks(release.plan, pointer, version))
    judged("readiness")


def vouched(release: Release, fallbacks: Sequence[FallbackCheck]) -> tuple[FallbackCheck, ...]:
    """What could serve instead; a version whose evidence does not verify counts as one that does not load."""

    def checked(item: FallbackCheck) -> FallbackCheck:
        try:
            verified(release.notary, release.store, release.registry, release.plan.model, item.version)
        except ReleaseError as error:
            return replace(item, loaded=False, detail=f"it may not serve: {error}")
        return item

    found = tuple(checked(item) for item in fallbacks)
    if not all(item.loaded for item in found):
        release.registry.aliases(release.plan.model)  # raises StoreError: a registry that is away is no reason to degrade what serves
    return found


def _candidate(release: Release, steps: Steps, pointer: Pointer) -> str:
    """The candidate's version; "" when it could not be made, and why stands in the gates that need it.

    Raises StoreError: a registry or a store that does not answer says nothing about the candidate, and the release can be finished later.
    """
    try:
        return steps.candidate(release, release.run_id, pointer).version
    except StoreError:
        raise
    except ReleaseError as error:
        for gate in ON_CANDIDATE:
            skip_gate(release, gate, f"the candidate could not be made: {error}")
        return ""


def _judge(release: Release, steps: Steps, gate: str, *, fresh: frozenset[str], keep: Keep) -> None:
    """Hold a gate, or keep its latest evidence when every digest that binds it still matches."""
    line, why = (None, "asked for") if gate in fresh or keep == "none" else reusable(release, gate, whatever=keep == "any")
    if line is not None:
        release.lines[gate] = line
        release.say(f"{gate}: kept, {why}")
        return
    release.say(f"{gate}: running ({why})")
    steps.gate(release, gate)


def _hold(release: Release, gate: str) -> None:
    hold_gate(release, gate)


def _train(release: Release, _run_id: str, pointer: Pointer) -> Candidate:
    return ensure_candidate(release, lambda: fresh_bench(release, "candidate"), pointer)


PLAIN = Steps(gate=_hold, baseline=ensure_serving, candidate=_train)  # every part as a plain call, in this process
