"""What serves after a decision: the pointer moves once, the aliases follow, a drill's candidate never serves."""

from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.candidate import Candidate
from flows.gates import Release
from flows.plan import ReleasePlan, ReleaseRequest
from flows.promote import decide_on, serve, unless_overtaken
from infra.journal import Journal
from infra.pointer import Pointer, move_pointer, read_pointer
from infra.registry import Registry
from infra.settings import load_settings
from infra.store import MemoryStore
from trainer.describe import RecipeFacts
from trainer.recipe import Card, DataContract, Training
from trainer.runlog import machine
from validation.decision import ReleaseDecision
from validation.errors import ConflictError
from validation.policy import GATES, parse_policy
from validation.records import FallbackCheck
from validation.verdict import GateVerdict, check, conclude

MODEL, RELEASE = "boat", "boat-20260101-000000-aaaa"
FACTS = RecipeFacts(
    path="boat:recipe", name=MODEL, card=Card(question="?", action="!", utility_unit="points", quality_name="accuracy", owner="crew"),
    training=Training(global_batch_size=8, epochs=1),
    contract=DataContract(columns={}, label="y", event_time="t", known_after_cutoff=(), min_rows={}, period={}, max_gap_days=1.0),
    slices=("s",), cluster="d", target_quality=0.5, steps=4, code_sha256="c", data_sha256="d", rows={"train": 8, "judge": 8},
)  # fmt: skip
GOOD = FallbackCheck(kind="last_known_good", version="2", loaded=True, predicted=True, detail="")
BASE = FallbackCheck(kind="baseline", version="1", loaded=True, predicted=True, detail="")


def release(*, drill: str = "", fallbacks: tuple[FallbackCheck, ...] = (GOOD, BASE)) -> Release:
    """A release of a model whose version 2 serves and whose candidate is version 3."""
    plan = ReleasePlan(
        release_id=RELEASE, request=ReleaseRequest(recipe="boat:recipe", drill=drill), facts=FACTS, policy=parse_policy(),
        world_sizes=(1, 2), folder=Path("unused"), machine=machine(), digests={},
    )  # fmt: skip
    store = MemoryStore()
    made = Release(plan=plan, store=store, journal=Journal(store, plan.release_id), say=lambda _: None)
    made.candidate = Candidate(
        version="3", run_id="r", model_uri="models:/boat/3", folder=Path("unused"), weights_sha256="w", state_sha256="s",
        worker_seconds=1.0, baseline_uri="models:/boat/1", last_known_good_uri="models:/boat/2",
    )  # fmt: skip
    made.fallbacks = fallbacks
    serving = Pointer(
        model=MODEL, serving_version="2", serving_kind="candidate", last_known_good="", baseline="1", release_id=plan.release_id, sequence=2
    )
    made.etag = move_pointer(store, serving, None)
    return made


def move_on(made: Release, version: str) -> None:
    """Another release puts a version in service meanwhile."""
    pointer, etag = read_pointer(made.store, MODEL)
    assert pointer is not None
    later = replace(pointer, serving_version=version, last_known_good="2", release_id="boat-20260102-000000-bbbb", sequence=9)
    move_pointer(made.store, later, etag)


def verdicts(**failed: float) -> list[GateVerdict]:
    """All gates at 1.0 of a floor of 0.5, but for those given."""
    return [
        conclude(gate, [check("measured", failed.get(gate, 1.0), ">=", 0.5, unit="", source="test")], passed_reason="fine")
        for gate in GATES
    ]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    """A registry on SQLite with three versions of the model."""
    settings = load_settings(home=tmp_path_factory.mktemp("registry") / "a home")
    opened = Registry(settings)
    client = MlflowClient(tracking_uri=settings.mlflow_tracking_uri)
    client.create_registered_model(MODEL)
    for _ in range(3):
        client.create_model_version(MODEL, source=str(settings.home))
    return opened


def decided(made: Release, registry: Registry, decision: ReleaseDecision) -> tuple[Pointer | None, dict[str, str]]:
    serve(made, registry, decision)
    return read_pointer(made.store, MODEL)[0], registry.aliases(MODEL)


def test_a_promoted_candidate_serves_and_the_one_before_is_last_known_good(registry: Registry) -> None:
    """Pointer and aliases both say so."""
    made = release()
    pointer, aliases = decided(made, registry, decide_on(made, verdicts()))

    assert pointer is not None
    assert (pointer.serving_version, pointer.serving_kind, pointer.last_known_good, pointer.sequence) == ("3", "candidate", "2", 3)
    assert aliases == {"champion": "3", "last-known-good": "2", "baseline": "1"}


def test_a_refused_candidate_leaves_what_serves(registry: Registry) -> None:
    """Nothing moves, and the aliases are what the pointer says."""
    made = release()
    before, _ = read_pointer(made.store, MODEL)
    pointer, aliases = decided(made, registry, decide_on(made, verdicts(slice_quality=0.1)))

    assert pointer == before
    assert aliases == {"champion": "2", "baseline": "1"}


def test_the_baseline_serves_when_the_last_known_good_does_not_load(registry: Registry) -> None:
    """An unsafe release degrades to the named baseline."""
    made = release(fallbacks=(replace(GOOD, loaded=False), BASE))
    pointer, aliases = decided(made, registry, decide_on(made, verdicts(scaling=0.1)))

    assert pointer is not None
    assert (pointer.serving_version, pointer.serving_kind) == ("1", "baseline")
    assert aliases["champion"] == "1"


def test_nothing_moves_when_no_fallback_answers(registry: Registry) -> None:
    """Held: the decision says that a person is needed, the pointer stays."""
    made = release(fallbacks=(replace(GOOD, predicted=False), replace(BASE, loaded=False)))
    decision = decide_on(made, verdicts(scaling=0.1))
    pointer, _ = decided(made, registry, decision)

    assert decision.decision == "held"
    assert pointer is not None
    assert pointer.serving_version == "2"


def test_a_drills_candidate_never_serves_even_if_every_gate_is_blind() -> None:
    """All gates pass, and the release of a drill still falls back."""
    decision = decide_on(release(drill="slice-regression"), verdicts())

    assert (decision.decision, decision.serving_version) == ("fell_back", "2")
    assert "slice-regression" in decision.reason


def test_a_drill_that_was_caught_is_refused_for_the_gates_reason_alone() -> None:
    """The rule that a drill never serves is not needed, and not named."""
    decision = decide_on(release(drill="slice-regression"), verdicts(slice_quality=0.1))

    assert decision.reason == "slice_quality is fail: measured is 0.1, has to be >= 0.5"


def test_a_refused_release_leaves_alone_what_another_one_promoted_meanwhile(registry: Registry) -> None:
    """The pointer stays on the version that was promoted while this release was judged, and the decision says that it serves."""
    made = release()
    move_on(made, "1")
    decision = unless_overtaken(made, decide_on(made, verdicts(scaling=0.1)))
    pointer, _ = decided(made, registry, decision)

    assert pointer is not None
    assert (pointer.serving_version, pointer.sequence) == ("1", 9)
    assert (decision.decision, decision.serving_version) == ("fell_back", "1")


def test_a_candidate_is_held_when_what_it_was_compared_with_no_longer_serves(registry: Registry) -> None:
    """All gates pass, but against a version that another release has replaced: nothing moves, the reason names that release."""
    made = release()
    move_on(made, "1")
    decision = unless_overtaken(made, decide_on(made, verdicts()))
    pointer, _ = decided(made, registry, decision)

    assert pointer is not None
    assert pointer.serving_version == "1"
    assert decision.decision == "held"
    assert "boat-20260102-000000-bbbb" in decision.reason


def test_a_candidate_that_served_before_does_not_come_back_by_an_old_gate() -> None:
    """Its release was promoted once and replaced since; holding a gate of it again moves nothing."""
    made = release()
    made.journal.append("decided", {"decision": "promoted", "serving": {"version": "3"}}, time_utc="2026-01-01T00:00:00+00:00")
    decision = unless_overtaken(made, decide_on(made, verdicts()))

    assert (decision.decision, decision.serving_version) == ("held", "2")
    assert "served before" in decision.reason


def test_a_pointer_that_moves_at_the_last_moment_is_never_overwritten(registry: Registry) -> None:
    """Between decision and move another release was faster: the compare-and-set refuses."""
    made = release()
    decision = unless_overtaken(made, decide_on(made, verdicts()))
    move_on(made, "1")

    with pytest.raises(ConflictError):
        serve(made, registry, decision)
