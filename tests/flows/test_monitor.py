"""What serves is judged by its matured outcomes, and leaves when it is proven bad or does not answer."""

import pytest
from helpers_watched import BAD, BASE, GOOD, MODEL, NEW, Watched, broken, watched, yard

from flows import monitor as module
from flows import predict as predicting
from flows.monitor import lines, monitor, monitor_flow
from flows.predict import predict, predict_flow
from infra.attestations import open_reader
from infra.pointer import read_pointer
from infra.store import get_evidence
from validation.errors import ConfigError, EvidenceError
from validation.statements import MONITOR

__all__ = ["broken", "watched", "yard"]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # MLflow's and torch.export's own


def score(watched: Watched, *days: int) -> None:
    for day in days:
        predict(watched.settings, say=watched.said.append, model=MODEL, day=f"2026-01-{day:02}")


def look(watched: Watched, day: int, *, dry_run: bool = False):
    return monitor(watched.settings, say=watched.said.append, model=MODEL, day=f"2026-01-{day:02}", dry_run=dry_run)


def serving(watched: Watched) -> str:
    pointer, _ = read_pointer(watched.desk.store, MODEL)
    return pointer.serving_version


def test_a_version_that_is_worse_than_its_fallback_is_rolled_back(watched: Watched) -> None:
    """Proven by outcomes: a dry run only says so, the next one puts last known-good in service, and the signed verdict stays."""
    watched.serve(BAD)
    score(watched, 3, 4)
    dry = look(watched, 6, dry_run=True)
    assert (dry["action"], dry["rollback"], serving(watched)) == ("roll_back", None, BAD)
    found = look(watched, 6)
    said = open_reader(watched.desk.store, watched.settings).read(found["attestation"], MONITOR)

    assert (found["ok"], found["health"], found["serving"]) == (False, "degraded", {"version": GOOD, "kind": "last_known_good"})
    assert found["rollback"]["reason"].startswith("monitor: evidence of being worse")
    assert get_evidence(watched.desk.store, said.subjects["evidence"])["verdict"]["outcome"] == "fail"
    assert watched.log.verdicts("2026-01-06") == (dry["attestation"], found["attestation"])
    assert "rolled back: version 2" in lines(found)[-1]


def test_a_good_version_stays(watched: Watched) -> None:
    """A version as good as its fallback keeps serving; lamps that were taken down are excluded, not missing."""
    watched.serve(NEW)
    score(watched, 3, 4)
    found = look(watched, 6)

    assert (found["ok"], found["rollback"], serving(watched)) == (True, None, NEW)
    # up to the 5th: two days of predictions, all of them mature
    assert (found["judged_up_to"], found["predictions"], found["outcomes"]) == ("2026-01-05", 240, 240)


def test_only_mature_outcomes_are_read(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the morning of the 5th the outcomes of the 3rd are final, those of the 4th are not."""
    watched.serve(NEW)
    score(watched, 3, 4)

    assert [look(watched, day)["outcomes"] for day in (4, 5, 6)] == [0, 120, 240]


def test_outcomes_that_never_come_are_missing(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A day without outcomes is not judged, and its version is not called healthy."""
    monkeypatch.setenv("LAMPS_LOST", "2026-01-04")
    watched.serve(BAD)
    score(watched, 4)
    found = look(watched, 6)

    assert (found["health"], found["action"], serving(watched)) == ("inconclusive", "watch", BAD)
    assert found["outcomes"] == 3  # those that were taken down


def test_a_version_that_does_not_load_is_replaced_at_once(watched: Watched, broken: str) -> None:
    """Its files are not those that were judged: nobody waits for outcomes."""
    watched.serve(broken)
    found = look(watched, 4)

    assert (found["ok"], found["action"], serving(watched)) == (False, "roll_back", GOOD)
    assert "does not load or answer" in found["reason"]


def test_a_broken_last_known_good_is_passed_over(watched: Watched, broken: str) -> None:
    """When the last known-good does not verify either, the named baseline serves."""
    watched.serve(BAD, good=broken)
    score(watched, 3, 4)
    found = look(watched, 7)

    assert found["reference_version"] == broken
    assert (found["health"], serving(watched)) == ("inconclusive", BAD)  # nothing to compare with, and it answers
    watched.files(BAD).rename(watched.files(BAD).with_suffix(".away"))
    try:
        assert look(watched, 7)["serving"] == {"version": BASE, "kind": "baseline"}
    finally:
        watched.files(BAD).with_suffix(".away").rename(watched.files(BAD))


def test_the_baseline_in_service_is_watched_alone(watched: Watched) -> None:
    """Without anything behind it, its service and inputs are judged; it is never worse than itself."""
    watched.serve(BASE, good="", baseline=BASE)
    score(watched, 3)
    found = look(watched, 5)

    assert (found["ok"], found["reference_version"], found["rollback"]) == (True, "", None)
    assert serving(watched) == BASE


def test_a_version_that_nobody_let_through_is_an_error(watched: Watched) -> None:
    """A pointer without a signed admission behind it is no evidence, and nothing is judged."""
    watched.serve(NEW)
    watched.desk.store.delete(f"models/{MODEL}/admitted/{NEW}")

    with pytest.raises(ConfigError, match="was never let through"):
        look(watched, 5)


def test_predictions_edited_by_hand_are_no_evidence(watched: Watched) -> None:
    """A part of the log that was removed is told, never passed over."""
    watched.serve(NEW)
    score(watched, 3)
    key = watched.desk.store.list("serving/lamps/days/2026-01-03/")[0]
    body, etag = watched.desk.store.get_with_etag(key)
    watched.desk.store.replace(key, body.replace(b'"answered":120', b'"answered":119'), etag)
    watched.desk.store.put_new(key.replace("0001", "0003"), body)

    with pytest.raises(EvidenceError, match=r"Restore serving/ from"):
        look(watched, 5)


def test_the_flows_show_what_was_done(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A day that was scored is green, a version that was taken out of service red, with checks, pictures and words on its page."""
    shown: dict[str, dict[str, object]] = {}
    for place in (module, predicting):
        monkeypatch.setattr(place, "make_ready", lambda: watched.settings)
        monkeypatch.setattr(place, "get_run_logger", lambda: type("Logger", (), {"info": watched.said.append}))
        monkeypatch.setattr(place, "create_markdown_artifact", lambda **given: shown.update({given["key"]: given}))
    monkeypatch.setattr(module, "create_table_artifact", lambda **given: shown.update({given["key"]: given}))
    watched.serve(BAD)
    score(watched, 3)
    scored = predict_flow.fn(MODEL, "2026-01-04")
    state = monitor_flow.fn(MODEL, "2026-01-06")

    assert (scored.name, state.name, state.is_failed()) == ("Scored", "Rolled back", True)
    assert set(shown) == {"predictions", "monitoring", "monitoring-checks"}
    assert "data:image/png;base64," in shown["monitoring"]["markdown"]  # type: ignore[operator]
    assert "rolled back: version 2" in str(shown["monitoring"]["description"])
