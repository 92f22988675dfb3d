"""Releases in each other's way, taken up late, or met by something that changed underneath: nothing untrue is said, nothing is stuck."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from support.rehearsal import MODEL, Part
from test_conduct import again, begun, home, played, serving, settings, store

from flows import acts, baseline, deciding, finishing, monitor, ownership, rollback
from flows import release as flow
from flows.acts import Desk, open_desk
from flows.conduct import PLAIN, conduct
from flows.finishing import abandon, finish, what_is_left
from flows.in_service import what_serves
from flows.ownership import known_entries, own
from flows.people import checked_answer, record_waiver
from flows.plan import request_of
from flows.reconcile import reconcile_model
from flows.under_way import Release
from flows.verifying import verify
from infra.journal import Entry, Journal
from infra.pointer import move_pointer, pointer_key, read_pointer
from infra.registry import VersionPage
from infra.settings import Settings
from infra.store import ObjectStore
from validation.canonical import canonical_json
from validation.errors import ConfigError, EvidenceError
from validation.policy import GATES

__all__ = ["home", "settings", "store"]

SHORT = Part(weights=b"second", floats={"scaling": 0.1})  # one gate fails, and it is one that may be waived


def dead(settings: Settings, part: Part, monkeypatch: pytest.MonkeyPatch, *, before: tuple[str, str]) -> Release:
    """A release whose process dies before it writes a record of this kind and effect."""
    release = begun(settings, part)
    kept = release.journal.append

    def append(kind: str, payload: Mapping[str, Any], *, time_utc: str) -> Entry:
        if (kind, payload.get("effect", "")) == before:
            raise InterruptedError
        return kept(kind, payload, time_utc=time_utc)

    with monkeypatch.context() as patch:
        patch.setattr(release.journal, "append", append)
        with pytest.raises(InterruptedError):
            conduct(release, PLAIN, fresh=frozenset(GATES), keep="none")
    return release


def finished(settings: Settings, release: Release) -> dict[str, Any]:
    return finish(settings, say=lambda _: None, release_id=release.plan.release_id)


def waived(release: Release, *, made_at: str = "", days: float = 1.0) -> None:
    """A person takes the risk of scaling."""
    said = checked_answer("Ada", "one device", approved=True, days=days, made_at=made_at or deciding.utc_now())
    journal = Journal(release.store, release.plan.release_id)
    record_waiver(journal, release.notary, "scaling", release.lines["scaling"].evidence_sha256, said)


def status(settings: Settings, version: str) -> str:
    registry = open_desk(settings, lambda _: None).registry
    return {page.version: page.status for page in registry.pages(MODEL)}[version]


def spoil(release: Release) -> None:
    """The candidate's files change in the registry."""
    assert release.candidate is not None
    (release.plan.home / "rehearsed" / release.plan.release_id / "candidate" / "weights").write_bytes(b"other")


def delete_run(settings: Settings, run_id: str, *, for_good: bool) -> None:
    """As a person does in the registry; for good as `mlflow gc` does."""
    MlflowClient(tracking_uri=settings.mlflow_tracking_uri).delete_run(run_id)
    if for_good:
        from mlflow.tracking._tracking_service.utils import _get_store

        _get_store(settings.mlflow_tracking_uri)._hard_delete_run(run_id)


def test_a_promotion_that_was_replaced_before_it_was_finished_stays_one(
    settings: Settings, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its version served and is the last known-good by now: it is not called refused, so it can still take over."""
    played(settings, Part(weights=b"first"))
    release = dead(settings, Part(weights=b"second"), monkeypatch, before=("done", "promote"))
    played(settings, Part(weights=b"third"))
    document = finished(settings, release)

    assert (document["decision"], document["serving"]["version"]) == ("promoted", serving(store).last_known_good)
    assert status(settings, serving(store).last_known_good) == "promoted"


def test_a_version_that_was_rolled_back_before_its_release_was_finished_stays_so(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its page does not call it promoted again."""
    release = dead(settings, Part(weights=b"second"), monkeypatch, before=("intent", "publish"))
    assert release.candidate is not None
    release.registry.mark(MODEL, release.candidate.version, "rolled_back", "wrong on holidays")
    finished(settings, release)

    assert status(settings, release.candidate.version) == "rolled_back"


@pytest.mark.parametrize("how", ["altered", "deleted"])
def test_a_decision_that_cannot_be_carried_out_can_be_given_up(
    settings: Settings, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The candidate changed or went between the decision and the move: what serves stays, and the release has an end."""
    played(settings, Part(weights=b"first"))
    before = serving(store)
    release = dead(settings, Part(weights=b"second"), monkeypatch, before=("intent", "promote"))
    assert release.candidate is not None
    spoil(release) if how == "altered" else MlflowClient().delete_model_version(MODEL, release.candidate.version)
    with pytest.raises(Exception, match="model"):
        finished(settings, release)
    document = abandon(settings, say=lambda _: None, release_id=release.plan.release_id, reason="its files are gone")

    assert (document["decision"], serving(store)) == ("abandoned", before)


@pytest.mark.parametrize("how", ["set aside", "for good"])
def test_a_run_that_was_deleted_does_not_keep_its_release_from_ending(
    settings: Settings, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its pages have nowhere to go; the decision holds, and the version's own page says so."""
    release = dead(settings, Part(weights=b"second"), monkeypatch, before=("intent", "publish"))
    assert release.candidate is not None
    delete_run(settings, release.run_id, for_good=how == "for good")
    said: list[str] = []
    document = finish(settings, say=said.append, release_id=release.plan.release_id)

    assert (document["decision"], serving(store).serving_version) == ("promoted", release.candidate.version)
    assert status(settings, release.candidate.version) == "promoted"
    assert [line for line in said if "was deleted in the registry" in line]


def test_a_run_that_was_deleted_before_the_candidate_was_registered_is_made_anew(
    settings: Settings, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The intent names a run that nothing can be written to any more."""
    part = Part(weights=b"second")
    release = dead(settings, part, monkeypatch, before=("done", "register_candidate"))
    MlflowClient().delete_model_version(MODEL, release.registry.versions(MODEL)[-1].version)
    delete_run(settings, release.run_id, for_good=True)
    taken_over = again(settings, release, part)
    conduct(taken_over, PLAIN, fresh=frozenset(), keep="good")

    assert taken_over.run_id != release.run_id
    assert serving(store).serving_version == release.registry.versions(MODEL)[-1].version
    assert serving(store).serving_kind == "candidate"


def test_a_refused_version_that_was_deleted_does_not_keep_its_release_from_ending(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no page left to say it on."""
    release = dead(settings, SHORT, monkeypatch, before=("intent", "publish"))
    assert release.candidate is not None
    MlflowClient().delete_model_version(MODEL, release.candidate.version)

    assert finished(settings, release)["decision"] != "promoted"


def test_a_decision_that_took_effect_is_not_given_up(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version serves already."""
    release = dead(settings, Part(weights=b"second"), monkeypatch, before=("done", "promote"))

    with pytest.raises(ConfigError, match="seatrial finish"):
        abandon(settings, say=lambda _: None, release_id=release.plan.release_id, reason="no more")


def before_owning(monkeypatch: pytest.MonkeyPatch, module: Any, act: Callable[[], object]) -> None:
    """Another process does this after a release was looked at, and before it is owned."""

    def owning(*given: Any, **named: Any) -> Any:
        monkeypatch.undo()
        act()
        return ownership.owning(*given, **named)

    monkeypatch.setattr(module, "owning", owning)


def test_a_release_that_was_given_up_a_moment_before_does_not_serve(
    settings: Settings, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`finish` saw a decision to carry out, and `abandon` was faster: what serves stays."""
    played(settings, Part(weights=b"first"))
    before = serving(store)
    release = dead(settings, Part(weights=b"second"), monkeypatch, before=("intent", "promote"))
    given_up = partial(abandon, settings, say=lambda _: None, release_id=release.plan.release_id, reason="its machine is gone")
    before_owning(monkeypatch, finishing, given_up)

    with pytest.raises(ConfigError, match="Release again"):
        finished(settings, release)
    assert (serving(store), release.journal.records()[-1].kind) == (before, "abandoned")


def test_a_release_that_was_ended_a_moment_before_is_not_ended_twice(
    settings: Settings, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two people finish it: the second finds nothing left, and writes nothing."""
    release, faster = dead(settings, Part(weights=b"second"), monkeypatch, before=("intent", "promote")), list[tuple[Entry, ...]]()
    before_owning(monkeypatch, finishing, lambda: [finished(settings, release), faster.append(release.journal.records())])
    document = finished(settings, release)

    assert (document["decision"], release.journal.records()) == ("promoted", faster[0])


def test_a_release_that_was_given_up_a_moment_before_is_not_judged(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the flow that holds gates."""
    release = dead(settings, Part(weights=b"second"), monkeypatch, before=("decision", ""))
    given_up = partial(abandon, settings, say=lambda _: None, release_id=release.plan.release_id, reason="its machine is gone")
    monkeypatch.setattr(flow, "slots_held", nullcontext)
    before_owning(monkeypatch, flow, given_up)

    with pytest.raises(ConfigError, match="Release again"):
        flow._go_on(settings, release.store, release.plan.release_id)


def test_a_word_that_came_a_moment_too_late_does_not_wake_an_abandoned_release(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """`abandon` and `waive` at once: whichever record comes last, the release is over."""
    release = dead(settings, SHORT, monkeypatch, before=("decision", ""))
    abandon(settings, say=lambda _: None, release_id=release.plan.release_id, reason="its machine is gone")
    waived(release)

    with pytest.raises(ConfigError, match="Release again"):
        known_entries(release.journal)
    with pytest.raises(ConfigError, match="Release again"):  # `seatrial gate` asks before it starts anything
        request_of(release.journal, "scaling")


def test_a_waiver_that_comes_while_the_release_decides_counts(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in the journal before the decision that did not know it: that one is made again."""
    release, kept = begun(settings, SHORT), deciding.build_report
    monkeypatch.setattr(deciding, "build_report", lambda *given: (monkeypatch.undo(), waived(release), kept(*given))[-1])
    document, _ = conduct(release, PLAIN, fresh=frozenset(GATES), keep="none")

    assert document["decision"] == "promoted"
    assert [entry.kind for entry in release.journal.records()].count("decision") == 2


def test_a_waiver_that_a_decision_did_not_know_is_judged_by_whoever_finishes(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process died between the decision and its second look."""
    release, kept = begun(settings, SHORT), deciding.build_report
    with monkeypatch.context() as patch:
        patch.setattr(deciding, "build_report", lambda *given: (waived(release), kept(*given))[-1])
        patch.setattr(deciding, "words_said", lambda _journal, **_: 0)
        conduct(release, PLAIN, fresh=frozenset(GATES), keep="none")

    assert what_is_left(release.journal.records()) == "judging"


def test_a_waiver_that_expired_before_the_pointer_moved_promotes_nothing(
    settings: Settings, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decided while it counted, taken up after it expired: held, with what to do."""
    release, _ = played(settings, SHORT)
    before = serving(store)
    waived(release, days=20.0)
    made = again(settings, release, SHORT)
    monkeypatch.setattr("flows.promote.utc_now", lambda: "2126-01-01T00:00:00+00:00")
    document, _ = conduct(made, PLAIN, keep="any")

    assert (document["decision"], serving(store)) == ("held", before)
    assert "expired on" in str(document["reason"])


def test_a_gate_that_was_waived_and_passes_now_serves_by_the_new_word(settings: Settings, store: ObjectStore) -> None:
    """What serves rests on no waiver any more."""
    release, _ = played(settings, SHORT)
    waived(release)
    conduct(again(settings, release, SHORT), PLAIN, keep="any")
    on_waiver = serving(store)
    conduct(again(settings, release, replace(SHORT, floats={})), PLAIN, fresh=frozenset({"scaling"}))
    now = serving(store)

    assert [len(release.notary.read(item.attestation).predicate["waivers"]) for item in (on_waiver, now)] == [1, 0]
    assert (now.serving_version, now.last_known_good) == (on_waiver.serving_version, on_waiver.last_known_good)


def test_a_waiver_that_was_overcome_is_not_held_against_what_serves(
    settings: Settings, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The monitor asks the pointer's own statement; the admission, written once, still names the waiver."""
    release, _ = played(settings, SHORT)
    waived(release)
    conduct(again(settings, release, SHORT), PLAIN, keep="any")
    monkeypatch.setattr(monitor, "utc_now", lambda: "2126-01-01T00:00:00+00:00")
    on_waiver = monitor._waiver_lapsed(desk_of(settings), what_serves(store, release.notary, MODEL))
    conduct(again(settings, release, replace(SHORT, floats={})), PLAIN, fresh=frozenset({"scaling"}))

    assert "expired on" in on_waiver
    assert monitor._waiver_lapsed(desk_of(settings), what_serves(store, release.notary, MODEL)) == ""


def test_what_serves_is_not_called_promoted_again_when_its_files_changed(settings: Settings) -> None:
    """A gate of the serving release is held again and passes, but the model in the registry is another one."""
    release, _ = played(settings, Part(weights=b"second"))
    spoil(release)

    with pytest.raises(EvidenceError, match="rollback"):
        conduct(again(settings, release, Part(weights=b"second")), PLAIN, fresh=frozenset({"scaling"}))


def test_a_recipe_that_changed_its_name_does_not_go_on_as_another_model(settings: Settings, store: ObjectStore) -> None:
    """Nothing is put in service under the new name by the old release."""
    release, _ = played(settings, Part())
    made = again(settings, release, Part())
    made.plan = replace(made.plan, facts=replace(made.plan.facts, name="ship"))

    with pytest.raises(ConfigError, match="old name"):
        conduct(made, PLAIN, keep="any")
    assert read_pointer(store, "ship") == (None, None)


def test_a_registry_that_was_made_anew_promotes_nothing(tmp_path: Path, settings: Settings, store: ObjectStore) -> None:
    """Its numbers begin again, and stand for other models than those that were signed."""
    played(settings, Part(weights=b"first"))
    before, client = serving(store), MlflowClient()
    client.delete_registered_model(MODEL)
    client.create_registered_model(MODEL)
    for _ in range(int(before.baseline) - 1):
        client.create_model_version(MODEL, source=tmp_path.as_uri())
    _, document = played(settings, Part(weights=b"other"))

    assert (document["decision"], serving(store)) == ("held", before)
    assert "Restore the registry" in str(document["gates"])


def test_evidence_of_another_release_is_not_kept(settings: Settings, store: ObjectStore) -> None:
    """The same gate, the same digests, a statement that verifies: but it is about another release."""
    other, _ = played(settings, Part())
    release = begun(settings, Part())
    for entry in other.journal.records():
        if entry.kind == "gate":
            release.journal.append("gate", entry.payload, time_utc=entry.time_utc)

    with pytest.raises(EvidenceError, match="not this one"):
        conduct(release, PLAIN, keep="good")


def test_a_process_that_died_before_its_first_record_leaves_nothing_to_finish(settings: Settings, store: ObjectStore) -> None:
    """It owned a release that never began: no command could end it, so none is named."""
    played(settings, Part(weights=b"first"))
    release_id = "boat-20260102-000000-dead"
    gone = replace(own(store, release_id), started=1)
    key = f"releases/{release_id}/owner"
    store.replace(key, canonical_json(gone), store.get_with_etag(key)[1])

    assert reconcile_model(desk_of(settings), MODEL)["notes"] == []


def desk_of(settings: Settings) -> Desk:
    return open_desk(settings, lambda _: None)


def go_back(settings: Settings, version: str = "") -> dict[str, Any]:
    asked = rollback.Request(model=MODEL, reason="wrong on holidays", by="ada", version=version)
    return rollback.carry_out_rollback(desk_of(settings), asked)


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions answer without being loaded."""
    monkeypatch.setattr(rollback, "refusal", lambda *_: "")


def test_a_baseline_whose_first_release_was_overtaken_when_it_died_is_not_left_without_a_word(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was registered and never served: whoever ends that release says on its page what it is."""

    def gone(*_: object) -> None:
        raise InterruptedError

    release = begun(settings, Part(weights=b"first"))
    with monkeypatch.context() as patch:
        patch.setattr(baseline, "admit", gone)
        with pytest.raises(InterruptedError):
            conduct(release, PLAIN, fresh=frozenset(GATES), keep="none")
    overtaken = release.registry.versions(MODEL)[-1].version  # the registry outlives a test
    played(settings, Part(weights=b"second"))
    assert status(settings, overtaken) == ""
    conduct(release, PLAIN, keep="any")

    assert status(settings, overtaken) == "baseline"


def test_the_last_known_good_stays_one_when_a_gate_of_its_release_is_held_again(settings: Settings, store: ObjectStore) -> None:
    """It passes and is held, since it was replaced: nothing was found against it, so it can still take over."""
    release, _ = played(settings, Part(weights=b"first"))
    played(settings, Part(weights=b"second"))
    before = serving(store)
    document, _ = conduct(again(settings, release, Part(weights=b"first")), PLAIN, fresh=frozenset({"scaling"}))

    assert (document["decision"], status(settings, before.last_known_good)) == ("held", "promoted")
    assert (reconcile_model(desk_of(settings), MODEL)["state"], serving(store)) == ("in_step", before)


def test_a_last_known_good_that_fails_a_gate_later_is_one_no_longer(settings: Settings, store: ObjectStore) -> None:
    """Something was found against it."""
    release, _ = played(settings, Part(weights=b"first"))
    played(settings, Part(weights=b"second"))
    good = serving(store).last_known_good
    conduct(again(settings, release, Part(weights=b"first", floats={"scaling": 0.1})), PLAIN, fresh=frozenset({"scaling"}))

    assert status(settings, good) == "refused"
    assert (reconcile_model(desk_of(settings), MODEL)["state"], serving(store).last_known_good) == ("mended", "")


def test_a_release_that_ends_while_it_is_looked_at_leaves_no_version_behind(
    settings: Settings, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its version's page said nothing when the versions were listed, and its journal was over when it was read."""
    release, desk = dead(settings, Part(weights=b"second"), monkeypatch, before=("candidate", "")), desk_of(settings)
    listed = desk.registry.pages

    def pages(model: str) -> tuple[VersionPage, ...]:
        monkeypatch.undo()
        found = listed(model)
        conduct(again(settings, release, Part(weights=b"second")), PLAIN, keep="good")
        return found

    monkeypatch.setattr(desk.registry, "pages", pages)
    document = reconcile_model(desk, MODEL)

    assert "version_abandoned" not in [item["kind"] for item in document["differences"]]
    assert status(settings, serving(store).serving_version) == "promoted"


def test_a_version_of_which_something_was_said_is_not_called_abandoned(settings: Settings) -> None:
    """An act that was left open is finished long after its release ended."""
    release, _ = played(settings, SHORT)
    assert release.candidate is not None
    desk, plan = desk_of(settings), {"version": release.candidate.version, "status": "abandoned", "reason": "nobody judged it"}
    acts.begin(desk, acts.new_act(desk.store, MODEL), "reconcile", [{"effect": "mark", "plan": plan}], model=MODEL)

    assert status(settings, release.candidate.version) == "refused"


@pytest.mark.usefixtures("answering")
def test_a_version_that_is_rolled_back_while_its_release_writes_its_page_is_called_so(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollback said its word after the page was read and before it was written."""
    played(settings, Part(weights=b"first"))
    release = begun(settings, Part(weights=b"second"))
    describe = release.registry.describe
    monkeypatch.setattr(release.registry, "describe", lambda *given, **named: [go_back(settings), describe(*given, **named)])
    conduct(release, PLAIN, fresh=frozenset(GATES), keep="none")
    assert release.candidate is not None

    assert status(settings, release.candidate.version) == "rolled_back"


@pytest.mark.usefixtures("answering")
def test_a_version_that_is_rolled_back_while_its_page_is_mended_is_called_so(
    settings: Settings, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reconcile found a page that said nothing, and the rollback was faster than its repair."""
    played(settings, Part(weights=b"first"))
    release = dead(settings, Part(weights=b"second"), monkeypatch, before=("intent", "publish"))
    desk, version = desk_of(settings), serving(store).serving_version
    tag = desk.registry.tag
    monkeypatch.setattr(desk.registry, "tag", lambda *given: [monkeypatch.undo(), go_back_at_once(settings), tag(*given)])
    reconcile_model(desk, MODEL)
    finished(settings, release)

    assert (serving(store).serving_version == version, status(settings, version)) == (False, "rolled_back")


def go_back_at_once(settings: Settings) -> None:
    """A rollback that does not finish what others began: that act is under way in this very process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollback, "refusal", lambda *_: "")
        patch.setattr(rollback, "finish_open_acts", lambda *_: [])
        go_back(settings)


@pytest.mark.usefixtures("answering")
def test_a_promotion_that_overtook_a_rollback_and_was_replaced_stays_one(
    settings: Settings, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollback meant to make the same move, and says itself to whom it lost it."""
    played(settings, Part(weights=b"first"))
    released: list[Release] = []

    def overtaken(*given: Any) -> dict[str, Any]:
        released.append(dead(settings, Part(weights=b"second"), monkeypatch, before=("done", "promote")))
        return acts._fall_back(*given)

    with monkeypatch.context() as patch:
        patch.setitem(acts._DOERS, "fall_back", overtaken)
        assert go_back(settings)["outcome"] == "overtaken"
    played(settings, Part(weights=b"third"))
    document = finished(settings, released[0])

    assert (document["decision"], document["serving"]["version"]) == ("promoted", serving(store).last_known_good)
    assert status(settings, serving(store).last_known_good) == "promoted"


@pytest.mark.usefixtures("answering")
def test_a_rollback_that_was_replaced_before_it_was_finished_was_one(
    settings: Settings, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It moved the pointer and died, a release came after it: the version that was found bad is called so all the same."""
    played(settings, Part(weights=b"first"))
    played(settings, Part(weights=b"second"))
    bad = serving(store).serving_version
    with monkeypatch.context() as patch:
        patch.setattr(acts, "move_pointer", _moved_and_dead)
        with pytest.raises(InterruptedError):
            go_back(settings)
    played(settings, Part(weights=b"third"))
    now = serving(store)
    (told,) = acts.finish_open_acts(desk_of(settings), MODEL)

    assert (told["results"]["moved"], serving(store)) == (True, now)
    assert (status(settings, bad), status(settings, now.last_known_good)) == ("rolled_back", "promoted")


def _moved_and_dead(*given: Any) -> None:
    move_pointer(*given)
    raise InterruptedError


@pytest.mark.usefixtures("answering")
def test_an_act_that_was_left_open_does_not_serve_what_was_altered_since(
    settings: Settings, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollback died before the pointer moved, and its version's files changed before somebody finished it."""
    good, _ = played(settings, Part(weights=b"first"))
    played(settings, Part(weights=b"second"))
    before = serving(store)
    with monkeypatch.context() as patch:
        patch.setattr(acts, "finish", lambda *_: (_ for _ in ()).throw(InterruptedError))
        with pytest.raises(InterruptedError):
            go_back(settings)
    spoil(good)
    (told,) = acts.finish_open_acts(desk_of(settings), MODEL)

    assert (told["ok"], told["results"]["moved"], serving(store)) == (True, False, before)
    assert "not the model that was judged" in told["results"]["overtaken"]["why"]


def test_a_pointer_from_a_backup_calls_a_person(settings: Settings, store: ObjectStore) -> None:
    """The registry followed a later move than the pointer knows of: the aliases, which still say so, are left alone."""
    played(settings, Part(weights=b"first"))
    older = store.get(pointer_key(MODEL))
    played(settings, Part(weights=b"second"))
    store.replace(pointer_key(MODEL), older, store.get_with_etag(pointer_key(MODEL))[1])
    aliases = desk_of(settings).registry.aliases(MODEL)
    document = reconcile_model(desk_of(settings), MODEL)

    assert (document["state"], [item["kind"] for item in document["differences"]]) == ("needs_person", ["pointer_older"])
    assert desk_of(settings).registry.aliases(MODEL) == aliases


@pytest.mark.usefixtures("answering")
def test_a_version_that_came_back_on_a_waiver_that_expired_is_a_note(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollback's own statement names no waiver; the one that let the version serve does."""
    release, _ = played(settings, SHORT)
    waived(release)
    conduct(again(settings, release, SHORT), PLAIN, keep="any")
    played(settings, Part(weights=b"third"))
    go_back(settings)
    monkeypatch.setattr("flows.verifying.utc_now", lambda: "2126-01-01T00:00:00+00:00")

    assert "waiver that expired" in verify(settings, say=lambda _: None, what=MODEL)["notes"][0]


@pytest.mark.parametrize("words", [{"reason": "\udcff"}, {"reason": "red \x1b[31m"}, {"by": "x" * 121, "reason": "r"}])
def test_words_that_cannot_be_read_back_are_not_signed(settings: Settings, words: dict[str, str]) -> None:
    """Bytes that are no text, signs that steer a terminal, a name of a page's length."""
    with pytest.raises(ConfigError, match="of 1 to"):
        rollback.roll_back(settings, say=lambda _: None, model=MODEL, **words)
