"""A release's order and its effects, with hands that need no ranks: what is decided, what serves, who may take over, what is kept."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.rehearsal import MODEL, Part, rehearse

from flows.clock import utc_now
from flows.conduct import PLAIN, conduct
from flows.deciding import people_now
from flows.effects import carry_out, open_effects
from flows.finishing import abandon, finish, what_is_left
from flows.ownership import own
from flows.people import checked_answer, record_approval, record_waiver
from flows.promote import make_true
from flows.under_way import Release
from infra.journal import Entry
from infra.pointer import Pointer, admission, move_pointer, read_pointer
from infra.registry import Registry
from infra.settings import Settings, embedded_environment, load_settings
from infra.store import ObjectStore, open_store
from trainer.children import pid_of
from validation.canonical import canonical_json
from validation.errors import ConfigError, ConflictError, EvidenceError, StoreError
from validation.policy import GATES


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One registry for all; each test has a store of its own."""
    folder = tmp_path_factory.mktemp("conduct") / "a home"
    Registry(load_settings(home=folder))
    return folder


@pytest.fixture
def settings(home: Path, tmp_path: Path) -> Settings:
    made = load_settings(home=home, store=str(tmp_path / "store"))
    os.environ.update(embedded_environment(made))
    return made


@pytest.fixture
def store(settings: Settings) -> ObjectStore:
    return open_store(settings)


_count = iter(range(10_000))


def begun(settings: Settings, part: Part) -> Release:
    """A release with its first record."""
    release = rehearse(settings, open_store(settings), Registry(settings), part, number=next(_count))
    started = {"request": release.plan.request, "model": MODEL, "digests": release.plan.digests}
    release.journal.append("started", started, time_utc=utc_now())
    return release


def played(settings: Settings, part: Part) -> tuple[Release, dict[str, object]]:
    """A whole release."""
    release = begun(settings, part)
    document, _ = conduct(release, PLAIN, fresh=frozenset(GATES), keep="none")
    return release, document


def again(settings: Settings, release: Release, part: Part) -> Release:
    """The same release in another process's hands."""
    return rehearse(settings, open_store(settings), Registry(settings), part, release_id=release.plan.release_id)


def serving(store: ObjectStore) -> Pointer:
    """What serves."""
    pointer, _ = read_pointer(store, MODEL)
    assert pointer is not None
    return pointer


def test_a_promoted_candidate_serves_signed_admitted_and_mirrored(settings: Settings, store: ObjectStore) -> None:
    """Pointer, admission and aliases name the same version, and the pointer names the statement that let it through."""
    release, document = played(settings, Part())
    pointer = serving(store)

    assert document["decision"] == "promoted"
    assert (pointer.serving_version, pointer.serving_kind) == (document["candidate_version"], "candidate")
    assert pointer.attestation == document["decision_sha256"] == admission(store, MODEL, pointer.serving_version)
    assert release.registry.aliases(MODEL)["champion"] == pointer.serving_version


def test_every_effect_has_an_intent_before_and_a_done_after(settings: Settings) -> None:
    """The journal tells in which order things came about."""
    release, _ = played(settings, Part())
    kinds = [f"{entry.kind} {entry.payload.get('effect', entry.payload.get('gate', ''))}".strip() for entry in release.journal.records()]

    assert kinds[:5] == ["started", "gate data_contract", "intent register_baseline", "done register_baseline", "intent serve_baseline"]
    assert kinds[-8:] == [
        "decision", "intent promote", "done promote", "intent publish", "done publish", "intent mirror", "done mirror", "decided",
    ]  # fmt: skip
    assert open_effects(release.journal.records()) == []


def test_the_version_before_becomes_last_known_good(settings: Settings, store: ObjectStore) -> None:
    """The second promoted release leaves the first one's version to fall back to."""
    _, first = played(settings, Part(weights=b"first"))
    _, second = played(settings, Part(weights=b"second"))

    assert serving(store).last_known_good == first["candidate_version"]
    assert serving(store).serving_version == second["candidate_version"]


def test_a_refused_candidate_leaves_what_serves(settings: Settings, store: ObjectStore) -> None:
    """Nothing moves, and the candidate was never admitted."""
    played(settings, Part(weights=b"first"))
    before = serving(store)
    _, document = played(settings, Part(weights=b"second", floats={"slice_quality": 0.1}))

    assert (document["decision"], serving(store)) == ("fell_back", before)
    assert admission(store, MODEL, str(document["candidate_version"])) == ""


def test_the_baseline_serves_when_what_served_no_longer_loads(settings: Settings, store: ObjectStore) -> None:
    """A refused release degrades to the named baseline, under the baseline's own statement."""
    played(settings, Part(weights=b"first"))
    played(settings, Part(weights=b"second", floats={"scaling": 0.1}, loads=False))
    pointer = serving(store)

    assert (pointer.serving_kind, pointer.serving_version) == ("baseline", pointer.baseline)
    assert pointer.attestation == admission(store, MODEL, pointer.baseline)


def test_nothing_moves_when_no_fallback_answers(settings: Settings, store: ObjectStore) -> None:
    """Held: a person is needed, and the pointer stays."""
    played(settings, Part(weights=b"first"))
    before = serving(store)
    _, document = played(settings, Part(weights=b"second", floats={"scaling": 0.1}, loads=False, baseline_loads=False))

    assert (document["decision"], serving(store)) == ("held", before)


def test_a_drills_candidate_never_serves_even_if_every_gate_is_blind(settings: Settings, store: ObjectStore) -> None:
    """All gates pass, and the release of a drill still falls back, naming the drill."""
    played(settings, Part(weights=b"first"))
    before = serving(store)
    _, document = played(settings, Part(weights=b"second", drill="slice-regression"))

    assert (document["decision"], serving(store)) == ("fell_back", before)
    assert "slice-regression" in str(document["reason"])


def test_a_drill_that_was_caught_is_refused_for_the_gates_reason_alone(settings: Settings) -> None:
    """The rule that a drill never serves is not needed, and not named."""
    _, document = played(settings, Part(drill="slice-regression", floats={"slice_quality": 0.1}))

    assert document["reason"] == "slice_quality is fail: measured is 0.1, has to be >= 0.5"


def test_a_candidate_that_served_before_does_not_come_back_by_an_old_gate(settings: Settings, store: ObjectStore) -> None:
    """Its release was promoted once and replaced since; holding a gate of it again moves nothing."""
    release, _ = played(settings, Part(weights=b"first"))
    played(settings, Part(weights=b"second"))
    before = serving(store)
    document, _ = conduct(again(settings, release, Part(weights=b"first")), PLAIN, fresh=frozenset({"scaling"}))

    assert (document["decision"], serving(store)) == ("held", before)
    assert "served before" in str(document["reason"])


def test_a_release_that_is_overtaken_says_by_whom(settings: Settings, store: ObjectStore) -> None:
    """Another release is faster between the decision and the move: the compare-and-set refuses, the loser is held."""
    played(settings, Part(weights=b"first"))
    slow = begun(settings, Part(weights=b"slow"))
    faster: list[str] = []

    def overtake(_done: int, gate: str) -> None:
        if gate == "readiness":
            faster.append(played(settings, Part(weights=b"fast"))[0].plan.release_id)

    document, _ = conduct(slow, replace(PLAIN, came_on=overtake), fresh=frozenset(GATES), keep="none")

    assert document["decision"] == "held"
    assert faster[0] in str(document["reason"])
    assert serving(store).release_id == faster[0]


def test_a_pointer_that_moves_after_the_decision_is_never_overwritten(settings: Settings, store: ObjectStore) -> None:
    """The decision stands, another release is faster: its version goes on serving, and the report says so."""
    played(settings, Part(weights=b"first"))
    release, document = played(settings, Part(weights=b"second", policy="decision: {approval: true}"))
    pointer, etag = read_pointer(store, MODEL)
    assert pointer is not None
    move_pointer(store, replace(pointer, sequence=pointer.sequence + 1, release_id="boat-20260102-000000-ffff"), etag)
    answer(release)
    made = again(settings, release, Part(weights=b"second", policy="decision: {approval: true}"))
    after, _ = conduct(made, PLAIN, keep="any")

    assert (document["decision"], after["decision"]) == ("held", "promoted")  # decided anew against what serves now
    assert serving(store).release_id == release.plan.release_id


def answer(release: Release, *, approved: bool = True) -> None:
    """A person's word."""
    said = checked_answer("Ada", "I looked at it", approved=approved, days=1.0, made_at=utc_now())
    record_approval(release.journal, release.notary, people_now(release).basis, said)


APPROVAL = Part(weights=b"second", policy="decision: {approval: true}")


def test_a_release_that_needs_a_person_is_held_until_one_says_yes(settings: Settings, store: ObjectStore) -> None:
    """Held with the command to type; after the yes every gate is kept and the candidate serves."""
    played(settings, Part(weights=b"first"))
    release, document = played(settings, APPROVAL)
    before = serving(store)
    answer(release)
    after, _ = conduct(again(settings, release, APPROVAL), PLAIN, keep="any")

    assert (document["decision"], before.serving_version == document["candidate_version"]) == ("held", False)
    assert "seatrial approve" in str(document["action"])
    assert after["decision"] == "promoted"
    assert all(gate["reused"] for gate in after["gates"])


def test_a_persons_no_refuses(settings: Settings, store: ObjectStore) -> None:
    """What served goes on serving, and the reason is the person's."""
    played(settings, Part(weights=b"first"))
    release, _ = played(settings, APPROVAL)
    before = serving(store)
    answer(release, approved=False)
    after, _ = conduct(again(settings, release, APPROVAL), PLAIN, keep="any")

    assert (after["decision"], serving(store)) == ("fell_back", before)
    assert "I looked at it" in str(after["reason"])


def test_a_waived_gate_is_a_condition_and_is_not_held_again(settings: Settings, store: ObjectStore) -> None:
    """A failed gate that may be waived lets the candidate serve, visibly; its evidence is the one that was waived."""
    part = Part(weights=b"second", floats={"scaling": 0.1})
    release, document = played(settings, part)
    said = checked_answer("Ada", "one machine only", approved=True, days=7.0, made_at=utc_now())
    record_waiver(release.journal, release.notary, "scaling", release.lines["scaling"].evidence_sha256, said)
    after, _ = conduct(again(settings, release, part), PLAIN, keep="good")
    gates = {gate["name"]: gate for gate in after["gates"]}

    assert (document["decision"], after["decision"]) == ("fell_back", "promoted")
    assert (gates["scaling"]["outcome"], gates["scaling"]["reused"]) == ("fail", True)
    assert "one machine only" in str(after["reason"])


def test_a_retry_holds_exactly_the_gates_that_did_not_pass(settings: Settings) -> None:
    """Passed gates stay with their reason; the failed one is held again and now passes."""
    release, _ = played(settings, Part(weights=b"second", floats={"scaling": 0.1}))
    document, _ = conduct(again(settings, release, Part(weights=b"second")), PLAIN, keep="good")
    held = [gate["name"] for gate in document["gates"] if not gate["reused"]]

    assert (held, document["decision"]) == (["scaling"], "promoted")
    assert {gate["name"]: gate["attempt"] for gate in document["gates"]}["scaling"] == 2


def test_a_changed_helper_makes_a_gate_stale_and_is_named(settings: Settings) -> None:
    """The digest is over every module that the gate reaches; the reason names the file."""
    release, _ = played(settings, Part())
    made = again(settings, release, Part())
    made.plan = replace(made.plan, sources={**made.plan.sources, "scaling": {"validation/helper.py": "0" * 64}})
    told: list[str] = []
    made.say = told.append
    document, _ = conduct(made, PLAIN, keep="good")

    assert [gate["name"] for gate in document["gates"] if not gate["reused"]] == ["scaling"]
    assert any("validation/helper.py" in line for line in told)


def test_a_dead_release_that_decided_is_ended_without_its_recipe(
    settings: Settings, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`finish` carries out the decision from the records alone, and a second time changes nothing."""
    release = begun(settings, Part())

    kept = release.journal.append

    def append(kind: str, payload: Mapping[str, Any], *, time_utc: str) -> Entry:
        if (kind, payload.get("effect")) == ("intent", "promote"):
            raise InterruptedError
        return kept(kind, payload, time_utc=time_utc)

    monkeypatch.setattr(release.journal, "append", append)
    with pytest.raises(InterruptedError):
        conduct(release, PLAIN, fresh=frozenset(GATES), keep="none")
    document = finish(settings, say=lambda _: None, release_id=release.plan.release_id)
    records = release.journal.records()
    finish(settings, say=lambda _: None, release_id=release.plan.release_id)

    assert (document["decision"], serving(store).release_id) == ("promoted", release.plan.release_id)
    assert release.journal.records() == records
    assert what_is_left(records) == "nothing"


def test_an_abandoned_release_never_goes_on(settings: Settings, store: ObjectStore) -> None:
    """It ends without a decision, what serves stays, and every later command refuses."""
    release = begun(settings, Part())
    document = abandon(settings, say=lambda _: None, release_id=release.plan.release_id, reason="its machine is gone")

    assert (document["ok"], read_pointer(store, MODEL)[0]) == (True, None)
    with pytest.raises(ConfigError, match="Release again"):
        finish(settings, say=lambda _: None, release_id=release.plan.release_id)


@pytest.mark.parametrize("command", [partial(abandon, reason="too slow"), finish], ids=["abandon", "finish"])
def test_a_living_release_is_neither_abandoned_nor_finished(settings: Settings, store: ObjectStore, command: Any) -> None:
    """Whose it is is named, and nothing is written."""
    release = begun(settings, Part())
    records = release.journal.records()
    with subprocess.Popen(["sleep", "60"]) as other:
        pid = pid_of(other.pid)
        there = replace(own(store, release.plan.release_id), pid=pid.pid, started=pid.started)
        _, etag = store.get_with_etag(f"releases/{release.plan.release_id}/owner")
        store.replace(f"releases/{release.plan.release_id}/owner", canonical_json(there), etag)
        with pytest.raises(ConflictError, match=f"kill {other.pid}"):
            command(settings, say=lambda _: None, release_id=release.plan.release_id)
        other.kill()

    assert release.journal.records() == records


def test_who_was_taken_over_holds_no_further_gate(settings: Settings) -> None:
    """Another host has the release: its old owner stops before the next gate, and decides nothing."""
    release = begun(settings, Part())

    def still_mine() -> None:
        if "gradient_equivalence" in release.lines:
            raise ConflictError("it was taken over")

    release.still_mine = still_mine
    with pytest.raises(ConflictError):
        conduct(release, PLAIN, fresh=frozenset(GATES), keep="none")

    assert [entry.payload["gate"] for entry in release.journal.records() if entry.kind == "gate"] == list(GATES[:2])


def away(*_: object) -> Any:
    """A registry that does not answer."""
    raise StoreError("MLflow could not register a model")


def test_a_registry_that_is_away_refuses_no_candidate(settings: Settings) -> None:
    """The release ends without a word on the candidate; with the registry back, another process finishes it and keeps its gates."""
    release = begun(settings, Part())
    real = release.hands
    release.hands = replace(real, register=lambda plan, run, artifact, *rest: (away if artifact == "candidate" else real.register)(
        plan, run, artifact, *rest))  # fmt: skip
    with pytest.raises(StoreError):
        conduct(release, PLAIN, fresh=frozenset(GATES), keep="none")
    kinds = [entry.kind for entry in release.journal.records()]
    document, _ = conduct(again(settings, release, Part()), PLAIN, keep="any")

    assert "decision" not in kinds
    assert [gate["name"] for gate in document["gates"] if gate["reused"]] == list(GATES[:3])
    assert document["decision"] == "promoted"


def test_a_registry_that_is_away_degrades_nothing(settings: Settings, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What serves cannot be fetched because nobody answers: no decision, and no baseline in its place."""
    played(settings, Part(weights=b"first"))
    before = serving(store)
    release = begun(settings, Part(weights=b"second", floats={"scaling": 0.1}, loads=False))
    monkeypatch.setattr(release.registry, "aliases", away)
    with pytest.raises(StoreError):
        conduct(release, PLAIN, fresh=frozenset(GATES), keep="none")

    assert serving(store) == before
    assert "decision" not in [entry.kind for entry in release.journal.records()]


def test_a_decision_is_not_abandoned(settings: Settings) -> None:
    """It has ended: going back is another command."""
    release, _ = played(settings, Part())

    with pytest.raises(ConfigError, match="seatrial rollback"):
        abandon(settings, say=lambda _: None, release_id=release.plan.release_id, reason="no reason")


def test_evidence_that_was_altered_after_the_decision_promotes_nothing(settings: Settings, store: ObjectStore) -> None:
    """The proof before the move reads every gate's evidence again."""
    part = Part(policy="decision: {approval: true}")
    release, _ = played(settings, part)
    before = serving(store)
    answer(release)
    sha256 = release.lines["scaling"].evidence_sha256
    body, etag = store.get_with_etag(f"evidence/sha256/{sha256}")
    store.replace(f"evidence/sha256/{sha256}", body.replace(b'"pass"', b'"PASS"'), etag)

    with pytest.raises(EvidenceError):
        conduct(again(settings, release, part), PLAIN, keep="any")
    assert serving(store) == before


def test_a_pointer_that_was_lost_is_not_made_up(settings: Settings, store: ObjectStore) -> None:
    """A candidate served once: another first release does not put the baseline in its place, and says how to go on."""
    played(settings, Part(weights=b"first"))
    store.delete(f"models/{MODEL}/pointer")

    with pytest.raises(EvidenceError, match="seatrial rollback boat --to"):
        played(settings, Part(weights=b"second"))
    assert read_pointer(store, MODEL)[0] is None


def test_an_effect_that_was_begun_is_ended_with_its_first_plan(settings: Settings) -> None:
    """Whatever the second process would do, it does what the first one intended; done, it is not done again."""
    release = begun(settings, Part())
    release.journal.append("intent", {"effect": "paint", "of": "boat", "plan": {"colour": "red"}}, time_utc=utc_now())
    did: list[str] = []

    def paint(plan: object) -> dict[str, str]:
        did.append(str(plan["colour"]))  # type: ignore[index]
        return {"colour": did[-1]}

    results = [carry_out(release.journal, "paint", "boat", {"colour": "blue"}, paint) for _ in range(2)]

    assert (did, results) == (["red"], [{"colour": "red"}] * 2)


def test_a_release_that_decided_nothing_cannot_be_made_true(settings: Settings) -> None:
    """There is nothing to carry out, and the next step is named."""
    with pytest.raises(EvidenceError, match="seatrial finish"):
        make_true(begun(settings, Part()).desk)
