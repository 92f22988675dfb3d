"""What serves is judged by its matured outcomes, and leaves when it is proven bad or does not answer."""

import os
import subprocess
import sys

import pytest
from helpers_serving import acts
from helpers_watched import BAD, BASE, GOOD, MODEL, NEW, Watched, broken, waived, watched, yard

from flows import monitor as module
from flows import predict as predicting
from flows.monitor import lines, monitor, monitor_flow
from flows.predict import predict, predict_flow
from flows.rollback import fall_back
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


def test_a_version_that_is_worse_than_its_fallback_is_rolled_back(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proven by outcomes: a dry run only says so, the next one, in the same second, puts last known-good in service; both verdicts stay."""
    monkeypatch.setattr(module, "utc_now", lambda: "2026-01-06T06:00:00+00:00")
    watched.serve(BAD)
    score(watched, 3, 4)
    dry = look(watched, 6, dry_run=True)
    assert (dry["action"], dry["rollback"], serving(watched)) == ("roll_back", None, BAD)
    found = look(watched, 6)
    said = open_reader(watched.desk.store, watched.settings).read(found["attestation"], MONITOR)

    assert (found["ok"], found["health"], found["serving"]) == (False, "degraded", {"version": GOOD, "kind": "last_known_good"})
    assert found["rollback"]["reason"].startswith("monitor: evidence of being worse")
    kept = get_evidence(watched.desk.store, said.subjects["evidence"])
    assert (kept["verdict"]["outcome"], kept["dry_run"]) == ("fail", False)
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


@pytest.mark.parametrize(
    ("now", "lapsed"), [("2026-02-01T00:00:00+00:00", ""), ("2026-03-01T00:00:00+00:00", "waiver")], ids=["counts", "expired"]
)
def test_a_version_on_an_expired_waiver_is_told(watched: Watched, monkeypatch: pytest.MonkeyPatch, now: str, lapsed: str) -> None:
    """It serves on, degraded, until a person waives again or rolls back; while the waiver counts nothing is said of it."""
    waived(watched.desk, NEW, expires_at="2026-02-10T18:15:42+00:00")
    watched.serve(NEW)
    score(watched, 3)
    monkeypatch.setattr(module, "utc_now", lambda: now)
    found = look(watched, 5)
    told = [item for item in found["verdict"].checks if item.name == "waiver"]

    assert (found["health"] == "degraded", [item.name for item in told]) == (bool(lapsed), [lapsed] if lapsed else [])
    assert (found["action"], serving(watched)) == ("watch" if lapsed else found["action"], NEW)
    assert not lapsed or "serves on a waiver that expired on 2026-02-10 18:15 UTC: scaling, waived by Ada: a known leak" in found["reason"]


def test_the_versions_of_one_day_are_judged_apart(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rollback at noon the bad morning is no part of what the afternoon's version is judged by, and the day stays in the log."""
    watched.serve(BAD)
    monkeypatch.setenv("LAMPS_NOW", "2026-01-03 12:00")
    score(watched, 3)
    bad = look(watched, 5, dry_run=True)
    fall_back(watched.settings, MODEL, "a test", leaving=BAD)
    monkeypatch.delenv("LAMPS_NOW")
    score(watched, 3)
    good = look(watched, 5)

    assert [(found["version"], found["predictions"], found["outcomes"]) for found in (bad, good)] == [(BAD, 60, 60), (GOOD, 60, 60)]
    assert [part.version for part in watched.log.parts("2026-01-03")] == [BAD, GOOD]
    assert (good["ok"], serving(watched)) == (True, GOOD)


KILLED = """
import os, signal, sys
from infra.settings import load_settings
from infra.store_folder import FolderStore

needle, after = sys.argv[3].encode(), sys.argv[4] == "after"

def killing(write):
    # A store that ends its process with SIGKILL just before or just after the write that holds the needle.
    def written(store, key, body, *more):
        found = needle in key.encode() + body
        if found and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        done = write(store, key, body, *more)
        if found:
            os.kill(os.getpid(), signal.SIGKILL)
        return done
    return written

FolderStore.put_new, FolderStore.replace = killing(FolderStore.put_new), killing(FolderStore.replace)
settings = load_settings(home=sys.argv[1], store=sys.argv[2])
if sys.argv[5] == "predict":
    from flows.predict import predict
    predict(settings, say=print, model="lamps", day=sys.argv[6])
else:
    from flows.monitor import monitor
    monitor(settings, say=print, model="lamps", day=sys.argv[6])
"""


def killed(watched: Watched, needle: str, when: str, command: str, day: str) -> int:
    """Run a command in a process of its own that dies at a write; how it ended."""
    settings = watched.settings
    arguments = [sys.executable, "-W", "ignore", "-c", KILLED, str(settings.home), settings.store, needle, when, command, day]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(arguments, env=environment, capture_output=True, timeout=120, check=False).returncode


@pytest.mark.slow  # a process of its own, which imports torch twice
@pytest.mark.parametrize("when", ["before", "after"])
def test_predict_killed_at_its_record_keeps_each_request_once(watched: Watched, when: str) -> None:
    """The table is kept, its record is not yet, or is: the same command again leaves every request answered by one row."""
    watched.serve(NEW)
    assert killed(watched, "serving/lamps/days/2026-01-03/0001", when, "predict", "2026-01-03") == -9
    assert len(watched.log.parts("2026-01-03")) == (when == "after")
    score(watched, 3)

    (part,) = watched.log.parts("2026-01-03")
    assert (part.rows, part.answered, watched.log.table(part)["row_id"].nunique()) == (120, 120, 120)


@pytest.mark.parametrize(
    ("needle", "when", "serves"),
    [
        pytest.param("serving/lamps/verdicts/2026-01-06/0001", "after", BAD, id="verdict, no rollback yet", marks=pytest.mark.slow),
        pytest.param('"kind":"intent"', "after", BAD, id="intent, pointer not moved", marks=pytest.mark.slow),
        pytest.param("models/lamps/pointer", "after", GOOD, id="pointer moved, nothing says so"),
    ],
)
def test_monitor_killed_at_its_rollback_ends_with_one(watched: Watched, needle: str, when: str, serves: str) -> None:
    """The same command again: the good version serves, by one act that is over, the pointer moved once, and nothing is left open."""
    watched.serve(BAD)
    score(watched, 3, 4)
    assert killed(watched, needle, when, "monitor", "2026-01-06") == -9
    assert serving(watched) == serves
    found = look(watched, 6)
    pointer, _ = read_pointer(watched.desk.store, MODEL)

    assert pointer is not None
    assert (pointer.serving_version, pointer.sequence, found["serving"]["version"]) == (GOOD, 2, GOOD)
    assert (found["rollback"] is None) == bool(found["finished"]) == (needle != "serving/lamps/verdicts/2026-01-06/0001")
    (kinds,) = acts(watched.desk, MODEL)
    assert (kinds[0], kinds[-1], kinds.count("finished")) == ("started", "finished", 1)
    assert watched.desk.registry.aliases(MODEL)["champion"] == GOOD


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
