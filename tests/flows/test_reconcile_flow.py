"""The reconciler on a real registry: what people do in its UI, what dying processes leave, and two of it at once."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from helpers_serving import RELEASE, Harbour, acts, admitted, altered, harbour, model, serves, serving

from flows import reconcile as reconciling
from flows import rollback as rolling
from flows.acts import Desk, new_act, open_acts
from flows.reconcile import lines, reconcile_model, reconcile_models
from flows.rollback import Request, carry_out_rollback
from infra.journal import Journal
from infra.pointer import admission, move_pointer, pointer_key, read_pointer
from infra.registry import FILES_TAG
from infra.store import evidence_key
from validation.errors import ConfigError, StoreError

__all__ = ["harbour", "model"]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # MLflow's and torch.export's own


@pytest.fixture(autouse=True)
def _answering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions answer without being loaded; tests/flows/test_rollback.py loads one."""
    monkeypatch.setattr(reconciling, "refusal", lambda *_: "")


def repairs(document: dict) -> list[tuple[str, str]]:
    """Kind and repair of every difference."""
    return [(item["kind"], item["repair"]) for item in document["differences"]]


def in_step(desk: Desk, model: str) -> bool:
    """Nothing differs any more, and looking left nothing behind."""
    before = desk.store.list("")
    again = reconcile_model(desk, model)
    return (again["state"], again["differences"], desk.store.list("")) == ("in_step", [], before)


def test_what_is_in_step_leaves_no_act(harbour: Harbour, model: str) -> None:
    """Nothing differs: nothing is written."""
    desk = harbour.desk()
    serving(harbour, desk, model)

    assert in_step(desk, model)
    assert acts(desk, model) == []


def test_aliases_that_people_moved_are_put_back(harbour: Harbour, model: str) -> None:
    """One deleted, one moved to an admitted version, one to a version that never was let through: all back, as one act."""
    desk = harbour.desk()
    before = serving(harbour, desk, model)
    stray = harbour.version(desk, model)
    client = desk.registry._client
    client.delete_registered_model_alias(model, "baseline")
    client.set_registered_model_alias(model, "champion", stray)
    client.set_registered_model_alias(model, "last-known-good", "3")
    document = reconcile_model(desk, model)

    assert repairs(document) == [("alias_moved", "set_alias"), ("alias_moved", "set_alias"), ("alias_missing", "set_alias")]
    assert document["state"] == "mended"
    assert desk.registry.aliases(model) == {"champion": "3", "last-known-good": "2", "baseline": "1"}
    assert read_pointer(desk.store, model)[0] == before
    assert acts(desk, model) == [["started", "intent", "done", "finished"]]
    assert in_step(desk, model)


def test_a_dry_run_changes_nothing(harbour: Harbour, model: str) -> None:
    """It says what differs, and leaves store and registry as they are."""
    desk = harbour.desk()
    serving(harbour, desk, model)
    desk.registry._client.delete_registered_model_alias(model, "champion")
    before = desk.store.list("")
    document = reconcile_models(harbour.settings, say=desk.say, models=[model], dry_run=True)

    assert document["models"][0]["state"] == "differs"
    assert [line.split(":")[0].strip() for line in lines(document)] == [model, "set alias"]
    assert "champion" not in desk.registry.aliases(model)
    assert [key for key in desk.store.list("") if not key.startswith("probe/")] == before


@pytest.mark.parametrize("to", ["2", "4"])
def test_under_adopt_an_admitted_version_serves(harbour: Harbour, model: str, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moved by hand to version 2, which verifies: it serves, by a signed act. To version 4, which does not: put back."""
    desk = harbour.desk()
    serving(harbour, desk, model)
    harbour.version(desk, model)
    adopting(desk, model)
    desk.registry._client.set_registered_model_alias(model, "champion", to)
    document = reconcile_model(desk, model)

    assert repairs(document)[0] == ("alias_moved", "adopt" if to == "2" else "set_alias")
    assert serves(desk, model) == (("2", "last_known_good", "") if to == "2" else ("3", "candidate", "2"))
    assert desk.registry.aliases(model)["champion"] == ("2" if to == "2" else "3")
    assert in_step(desk, model)


def test_under_adopt_a_promotion_whose_aliases_lag_stands(harbour: Harbour, model: str) -> None:
    """A release moved the pointer and was killed before the aliases followed: that is no wish of a person's."""
    desk = harbour.desk()
    serving(harbour, desk, model, mirrored=False)
    adopting(desk, model)
    pointer, _ = read_pointer(desk.store, model)
    assert pointer is not None
    desk.registry.mirror(replace(pointer, serving_version="2", last_known_good="", sequence=2))
    document = reconcile_model(desk, model)

    assert [item["kind"] for item in document["differences"]] == ["alias_behind", "alias_missing"]
    assert serves(desk, model) == ("3", "candidate", "2")
    assert desk.registry.aliases(model) == {"champion": "3", "last-known-good": "2", "baseline": "1"}


@pytest.mark.parametrize("broken", ["deleted", "altered", "gone", "evidence"])
def test_a_serving_version_that_cannot_serve_falls_back(harbour: Harbour, model: str, broken: str) -> None:
    """Deleted in the UI, one byte changed, files removed, its decision edited: the last known-good serves, signed."""
    desk = harbour.desk()
    serving(harbour, desk, model)
    break_version(harbour, desk, model, "3", broken)
    document = reconcile_model(desk, model)

    assert repairs(document)[0][1] == "roll_back_to"
    assert serves(desk, model) == ("2", "last_known_good", "")
    assert desk.registry.aliases(model) == {"champion": "2", "baseline": "1"}
    assert in_step(desk, model)


def test_then_the_baseline_then_nobody(harbour: Harbour, model: str) -> None:
    """Both newer versions deleted: the baseline. Its files altered too: everything stays, and a person is called."""
    desk = harbour.desk()
    serving(harbour, desk, model)
    break_version(harbour, desk, model, "3", "deleted")
    break_version(harbour, desk, model, "2", "deleted")
    assert reconcile_model(desk, model)["state"] == "mended"
    assert serves(desk, model) == ("1", "baseline", "")

    break_version(harbour, desk, model, "1", "altered")
    before = len(acts(desk, model))
    document = reconcile_models(harbour.settings, say=desk.say, models=[model])
    assert (document["ok"], document["models"][0]["state"]) == (False, "needs_person")
    assert serves(desk, model) == ("1", "baseline", "")
    assert len(acts(desk, model)) == before


def test_what_does_not_answer_is_passed_over(harbour: Harbour, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last known-good verifies but hangs when it is tried: the baseline takes over."""
    desk = harbour.desk()
    serving(harbour, desk, model)
    break_version(harbour, desk, model, "3", "deleted")
    monkeypatch.setattr(reconciling, "refusal", lambda _desk, _model, proof: "it hangs" if proof.version == "2" else "")
    document = reconcile_model(desk, model)

    assert "version 2 does not answer: it hangs" in document["differences"][0]["words"]
    assert serves(desk, model) == ("1", "baseline", "")


def test_files_that_cannot_be_read_are_no_reason_to_fall_back(harbour: Harbour, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of files does not answer: what serves stays, a person is called."""
    desk = harbour.desk()
    serving(harbour, desk, model)

    def refuse(*_: object) -> str:
        raise StoreError("status 503")

    monkeypatch.setattr(desk.registry, "files", refuse)
    document = reconcile_model(desk, model)

    assert document["state"] == "needs_person"
    assert serves(desk, model) == ("3", "candidate", "2")


def test_pages_are_mended(harbour: Harbour, model: str) -> None:
    """Description and tags that were removed or edited by hand are written again from what was signed."""
    desk = harbour.desk()
    serving(harbour, desk, model)
    client = desk.registry._client
    client.update_model_version(model, "3", description="")
    client.set_model_version_tag(model, "2", "status", "excellent")
    client.delete_model_version_tag(model, "1", FILES_TAG)
    reconcile_model(desk, model)
    pages = desk.registry.pages(model)

    assert [page.status for page in pages] == ["baseline", "promoted", "promoted"]
    assert pages[0].tags[FILES_TAG] == desk.registry.files(model, "1")
    assert pages[2].description.startswith(f"Promoted by {RELEASE}")
    assert in_step(desk, model)


def test_what_a_dead_release_left_behind(harbour: Harbour, model: str) -> None:
    """A release that ended without a decision is named with the commands; once it is abandoned, its version is marked."""
    desk = harbour.desk()
    serving(harbour, desk, model)
    release_id = f"{model}-20260201-000000-dead"
    journal = Journal(desk.store, release_id)
    journal.append("started", {"model": model}, time_utc="2026-02-01T00:00:00+00:00")
    version = harbour.version(desk, model, run_id=desk.registry.start_run(model, release_id))
    document = reconcile_model(desk, model)
    assert document["state"] == "in_step"
    assert f"`seatrial finish {release_id}`" in document["notes"][0]

    journal.append("abandoned", {"reason": "gone"}, time_utc="2026-02-01T00:00:00+00:00")
    assert repairs(reconcile_model(desk, model)) == [("version_abandoned", "mark_abandoned")]
    assert desk.registry.pages(model)[int(version) - 1].status == "abandoned"


@pytest.mark.parametrize("body", [b"{}", None], ids=["unreadable", "gone"])
def test_a_pointer_that_cannot_be_read_is_never_guessed(harbour: Harbour, model: str, body: bytes | None) -> None:
    """A person is called, with the exact command; nothing is written."""
    desk = harbour.desk()
    serving(harbour, desk, model)
    desk.store.delete(pointer_key(model))
    if body is not None:
        desk.store.put_new(pointer_key(model), body)
    document = reconcile_model(desk, model)

    assert document["state"] == "needs_person"
    assert f"`seatrial rollback {model} --to 3" in document["differences"][0]["words"]
    assert acts(desk, model) == []


@pytest.mark.parametrize("attestation", ["", "of version 2", "f" * 64], ids=["none", "of-another", "unknown"])
def test_a_pointer_that_was_edited_calls_a_person(harbour: Harbour, model: str, attestation: str) -> None:
    """It names an admitted version, but not by a signed word: reported with the command, which signs for it and marks nothing."""
    desk = harbour.desk()
    pointer = serving(harbour, desk, model)
    wrong = admission(desk.store, model, "2") if attestation == "of version 2" else attestation
    move_pointer(desk.store, replace(pointer, attestation=wrong), desk.store.get_with_etag(pointer_key(model))[1])
    document = reconcile_model(desk, model)

    assert (document["state"], repairs(document)) == ("needs_person", [("pointer_not_signed", "report_only")])
    assert f"`seatrial rollback {model} --to 3" in document["differences"][0]["words"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rolling, "refusal", lambda *_: "")
        carry_out_rollback(desk, Request(model=model, reason="it is the right one", by="ada", version="3"))
    assert serves(desk, model) == ("3", "candidate", "2")
    assert in_step(desk, model)


def test_what_an_act_left_open_is_finished_first(harbour: Harbour, model: str) -> None:
    """The process of an act died after its first record: the reconciler does the rest."""
    desk = harbour.desk()
    serving(harbour, desk, model)
    desk.registry._client.delete_registered_model_alias(model, "champion")
    journal = new_act(desk.store, model)
    journal.append(
        "started", {"act": "reconcile", "model": model, "steps": [{"effect": "mirror", "plan": {}}]}, time_utc="2026-02-01T00:00:00+00:00"
    )
    document = reconcile_model(desk, model)

    assert (document["state"], document["notes"]) == ("in_step", [f"act {journal.release_id} was left open; it is finished now"])
    assert desk.registry.aliases(model)["champion"] == "3"
    assert open_acts(desk.store, model) == ()


def test_an_act_that_cannot_be_finished_is_named_and_stops_nothing(harbour: Harbour, model: str) -> None:
    """Its journal was edited: the rest is mended all the same."""
    desk = harbour.desk()
    serving(harbour, desk, model)
    journal = new_act(desk.store, model)
    journal.append("started", {"act": "reconcile", "model": model, "steps": []}, time_utc="2026-02-01T00:00:00+00:00")
    altered(Path(harbour.settings.store) / f"acts/{journal.release_id}/numbers/0001")
    desk.registry._client.delete_registered_model_alias(model, "champion")
    document = reconcile_model(desk, model)

    assert document["state"] == "needs_person"
    assert "does not verify" in document["notes"][0] or "cannot be read" in document["notes"][0]
    assert desk.registry.aliases(model)["champion"] == "3"


@pytest.mark.filterwarnings("ignore:DELETE statement on table")  # SQLAlchemy, of an alias that another one deleted just before
def test_many_reconcilers_at_once_do_no_harm(harbour: Harbour, model: str) -> None:
    """Eight of them see the same deleted version: the pointer moves once, and everything is in step afterwards."""
    desk = harbour.desk()
    serving(harbour, desk, model)
    break_version(harbour, desk, model, "3", "deleted")
    with ThreadPoolExecutor(8) as pool:
        documents = list(pool.map(lambda _: reconcile_model(harbour.desk(), model), range(8)))

    pointer, _ = read_pointer(desk.store, model)
    assert pointer is not None
    assert (serves(desk, model), pointer.sequence) == (("2", "last_known_good", ""), 4)
    assert {item["state"] for item in documents} <= {"in_step", "mended"}
    assert in_step(desk, model)


def test_a_release_that_is_faster_wins(harbour: Harbour, model: str) -> None:
    """The pointer moves between looking and mending: it is left to whoever moved it."""
    desk = harbour.desk()
    pointer = serving(harbour, desk, model)
    break_version(harbour, desk, model, "3", "deleted")
    admitted(desk, model, newest := harbour.version(desk, model, text="newer"))
    real = reconciling.begin

    def late(*given: object, **facts: object) -> dict:
        moved = replace(pointer, serving_version=newest, release_id="boat-x", sequence=4)
        move_pointer(desk.store, moved, desk.store.get_with_etag(pointer_key(model))[1])
        return real(*given, **facts)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reconciling, "begin", late)
        document = reconcile_model(desk, model)

    assert "overtaken: boat-x moved the pointer" in document["notes"][0]
    assert serves(desk, model)[0] == newest
    assert desk.registry.aliases(model)["champion"] == newest


def test_an_unknown_model_is_an_input_error(harbour: Harbour) -> None:
    """It names those that there are."""
    with pytest.raises(ConfigError, match="no model 'ship'"):
        reconcile_models(harbour.settings, say=lambda _: None, models=["ship"])


def adopting(desk: Desk, model: str) -> None:
    """The release that let the versions through had the policy "adopt"."""
    journal = Journal(desk.store, RELEASE)
    if not journal.records():
        request = {"recipe": "boat", "policy_text": "reconcile: {moved_alias: adopt}", "world_sizes": [], "drill": ""}
        journal.append("started", {"request": request, "model": model}, time_utc="2026-01-31T18:15:42+00:00")


def break_version(harbour: Harbour, desk: Desk, model: str, version: str, how: str) -> None:
    """Make a version one that cannot serve."""
    if how == "deleted":
        desk.registry._client.delete_model_version(model, version)
    elif how == "altered":
        altered(harbour.files(model, version) / "data" / "model.pt2")
    elif how == "gone":
        harbour.files(model, version).rename(harbour.files(model, f"{version}-moved"))
    else:
        path = Path(harbour.settings.store) / evidence_key(admission(desk.store, model, version))
        path.write_bytes(path.read_bytes().replace(b"payload", b"PAYLOAD"))
