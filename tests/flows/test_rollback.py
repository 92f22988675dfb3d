"""Going back to an earlier version: which one, on what proof, once, whoever dies or is faster."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers_serving import Harbour, acts, altered, harbour, model, serves, serving

from flows import rollback
from flows.acts import Desk, finish, open_acts
from flows.rollback import Request, carry_out_rollback, lines
from infra.journal import Journal
from infra.pointer import admission, move_pointer, pointer_key, read_pointer
from infra.store import MemoryStore, evidence_key
from validation.errors import ConfigError, EvidenceError, StoreError
from validation.statements import ROLLBACK

__all__ = ["harbour", "model"]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # MLflow's and torch.export's own


def ask(model: str, version: str = "", *, leaving: str = "") -> Request:
    """A rollback as a person asks for it."""
    return Request(model=model, reason="late departures are scored as punctual", by="ada", version=version, leaving=leaving)


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions answer without being loaded: what these tests are about comes before and after that."""
    monkeypatch.setattr(rollback, "refusal", lambda *_: "")


def test_a_rollback_puts_the_last_known_good_in_service(harbour: Harbour, model: str) -> None:
    """The version is loaded and asked; pointer, signed statement, aliases, pages and journal all say it, and the act is over."""
    desk = harbour.desk()
    serving(harbour, desk, model)
    document = carry_out_rollback(desk, ask(model))

    assert (document["ok"], document["outcome"], document["serving"]) == (True, "rolled_back", {"version": "2", "kind": "last_known_good"})
    pointer, _ = read_pointer(desk.store, model)
    assert pointer is not None
    said = desk.notary.read(pointer.attestation, ROLLBACK).predicate
    assert (said["version"], said["from_version"], said["by"], said["act_id"]) == ("2", "3", "ada", document["act_id"])
    assert (pointer.last_known_good, pointer.sequence, pointer.release_id) == ("", 4, document["act_id"])
    assert desk.registry.aliases(model) == {"champion": "2", "baseline": "1"}
    assert {page.version: page.status for page in desk.registry.pages(model)} == {"1": "baseline", "2": "promoted", "3": "rolled_back"}
    assert acts(desk, model) == [["started", *["intent", "done"] * 4, "finished"]]
    assert "version 2 (last known good) serves instead of 3" in lines(document)[0]


def test_going_back_again_ends_at_the_baseline(harbour: Harbour, model: str, answering: None) -> None:
    """A second rollback reaches the baseline, a third finds nothing and leaves it."""
    desk = harbour.desk()
    serving(harbour, desk, model)
    found = [carry_out_rollback(desk, ask(model)) for _ in range(3)]

    assert [item["outcome"] for item in found] == ["rolled_back", "rolled_back", "refused"]
    assert serves(desk, model) == ("1", "baseline", "")
    assert desk.registry.pages(model)[0].status == "baseline"


def test_a_version_by_number_comes_back(harbour: Harbour, model: str, answering: None) -> None:
    """--to takes any admitted version, also one that was rolled back; its page says promoted again and the other one's rolled back."""
    desk = harbour.desk()
    serving(harbour, desk, model)
    carry_out_rollback(desk, ask(model))
    left = desk.registry.pages(model)[2].description
    document = carry_out_rollback(desk, ask(model, "3"))

    assert left.startswith("Rolled back since: ")
    assert desk.registry.pages(model)[2].description.startswith("Promot")
    assert serves(desk, model) == ("3", "last_known_good", "")
    assert [page.status for page in desk.registry.pages(model)] == ["baseline", "rolled_back", "promoted"]
    assert carry_out_rollback(desk, ask(model, "3"))["outcome"] == "already"
    assert document["ok"]
    assert len(acts(desk, model)) == 2


def test_the_last_known_good_stays_when_another_version_is_named(harbour: Harbour, model: str, answering: None) -> None:
    """Going to the baseline by number keeps the verified last known-good to fall back to; it is never the version that was left."""
    desk = harbour.desk()
    serving(harbour, desk, model, promoted=3)
    carry_out_rollback(desk, ask(model, "1"))
    assert serves(desk, model) == ("1", "baseline", "3")

    carry_out_rollback(desk, ask(model))
    assert serves(desk, model) == ("3", "last_known_good", "")


@pytest.mark.parametrize("broken", ["files", "deleted", "evidence"])
def test_a_last_known_good_that_does_not_verify_is_passed_over(harbour: Harbour, model: str, answering: None, broken: str) -> None:
    """Altered files, a deleted version and edited evidence each lead on to the baseline, with the reason."""
    desk = harbour.desk()
    serving(harbour, desk, model)
    if broken == "files":
        altered(harbour.files(model, "2") / "data" / "model.pt2")
    elif broken == "deleted":
        desk.registry._client.delete_model_version(model, "2")
    else:
        path = Path(harbour.settings.store) / evidence_key(admission(desk.store, model, "2"))
        path.write_bytes(path.read_bytes().replace(b"payload", b"PAYLOAD"))
    document = carry_out_rollback(desk, ask(model))

    assert serves(desk, model) == ("1", "baseline", "")
    assert document["tried"][0].startswith("version 2 cannot take over")


def test_a_version_that_does_not_answer_is_passed_over(harbour: Harbour, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verified is not enough: it has to load and answer. By number it is refused, and nothing moves."""
    desk = harbour.desk()
    before = serving(harbour, desk, model)
    monkeypatch.setattr(rollback, "refusal", lambda _desk, _model, proof: "it hangs" if proof.version == "2" else "")

    with pytest.raises(EvidenceError, match=r"does not answer.*Name another version with --to"):
        carry_out_rollback(desk, ask(model, "2"))
    assert read_pointer(desk.store, model)[0] == before
    assert carry_out_rollback(desk, ask(model))["tried"] == ["version 2 cannot take over: it hangs"]


def test_nothing_verified_holds(harbour: Harbour, model: str, answering: None) -> None:
    """No last known-good and a baseline whose files were altered: refused, what serves stays, no act."""
    desk = harbour.desk()
    before = serving(harbour, desk, model, promoted=1)
    altered(harbour.files(model, "1") / "MLmodel")
    document = carry_out_rollback(desk, ask(model))

    assert (document["ok"], document["outcome"]) == (False, "refused")
    assert read_pointer(desk.store, model)[0] == before
    assert acts(desk, model) == []


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        pytest.param({"model": "no-such-boat"}, "there is no model 'no-such-boat'", id="unknown-model"),
        pytest.param({"model": "../boat"}, "there is no model", id="path"),
        pytest.param({"version": "9"}, "never let through.*Choose one of: 2, 1", id="unknown-version"),
        pytest.param({"version": "3"}, "never let through", id="not-admitted"),
        pytest.param({"version": "two"}, "whole numbers", id="no-number"),
        pytest.param({"version": "٣"}, "whole numbers", id="other-digits"),
        pytest.param({"reason": " "}, "needs a reason", id="no-reason"),
        pytest.param({"reason": "x" * 2001}, "needs a reason", id="long-reason"),
    ],
)
def test_what_a_person_got_wrong_is_refused(harbour: Harbour, request_: dict[str, str], named: str) -> None:
    """Each is an input error that says what to do; nothing is moved and no act is begun."""
    desk = harbour.desk()
    if read_pointer(desk.store, "boat-inputs")[0] is None:
        serving(harbour, desk, "boat-inputs", promoted=1)
        harbour.version(desk, "boat-inputs")

    with pytest.raises(ConfigError, match=named):
        carry_out_rollback(desk, replace(ask("boat-inputs"), **request_))
    assert serves(desk, "boat-inputs") == ("2", "candidate", "")
    assert acts(desk, "boat-inputs") == []


def test_an_admission_of_another_model_does_not_count(harbour: Harbour, model: str) -> None:
    """An admission copied from another model, or another version's statement under this number, is evidence that does not verify."""
    desk = harbour.desk()
    serving(harbour, desk, model)
    harbour.version(desk, model)
    body = desk.store.get(f"models/{model}/admitted/3")
    desk.store.put_new(f"models/{model}/admitted/4", body.replace(b'"version":"3"', b'"version":"4"'))

    with pytest.raises(EvidenceError, match=r"it is about .* version 3"):
        carry_out_rollback(desk, ask(model, "4"))
    desk.store.put_new(f"models/{model}/admitted/5", body)
    with pytest.raises(EvidenceError, match="does not say what let this version serve"):
        carry_out_rollback(desk, ask(model, "5"))


def test_a_release_that_was_faster_is_named(harbour: Harbour, model: str, answering: None) -> None:
    """The pointer moves between the choice and the move: nothing is changed, and it is said by whom."""
    desk = harbour.desk()
    before = serving(harbour, desk, model)
    faster = replace(before, serving_version="1", release_id="boat-x", sequence=before.sequence + 1)
    store = Interrupting(desk.store, lambda: move_pointer(desk.store, faster, desk.store.get_with_etag(pointer_key(model))[1]))
    document = carry_out_rollback(Desk(store, desk.registry, desk.notary, desk.say), ask(model))

    assert (document["ok"], document["outcome"]) == (False, "overtaken")
    assert "boat-x moved the pointer meanwhile" in document["words"]
    assert serves(desk, model)[0] == "1"
    assert desk.registry.aliases(model)["champion"] == "1"
    assert desk.registry.pages(model)[2].status == "promoted"


def test_a_monitor_leaves_alone_what_it_did_not_judge(harbour: Harbour, model: str, answering: None) -> None:
    """`fall_back` names the version it found bad: when another one serves by now, nothing is done."""
    desk = harbour.desk()
    serving(harbour, desk, model)
    late = carry_out_rollback(desk, ask(model, leaving="2"))

    assert (late["ok"], late["outcome"]) == (False, "overtaken")
    assert serves(desk, model)[0] == "3"
    assert rollback.fall_back(harbour.settings, model, "worse than its fallback", leaving="3")["serving"]["version"] == "2"


@pytest.mark.parametrize("body", [b"", b'{"model":"x"}', None], ids=["empty", "partial", "gone"])
def test_a_pointer_that_cannot_be_read_needs_a_version_by_number(harbour: Harbour, model: str, answering: None, body: bytes | None) -> None:
    """It is never guessed; the error holds the exact command, and that command writes it anew."""
    desk = harbour.desk()
    serving(harbour, desk, model)
    desk.store.delete(pointer_key(model))
    if body is not None:
        desk.store.put_new(pointer_key(model), body)

    with pytest.raises(EvidenceError, match=rf"the registry last showed 3.*seatrial rollback {model} --to 3"):
        carry_out_rollback(desk, ask(model))
    assert carry_out_rollback(desk, ask(model, "3"))["ok"]
    pointer, _ = read_pointer(desk.store, model)
    assert pointer is not None
    assert (pointer.serving_version, pointer.baseline, pointer.last_known_good, pointer.sequence) == ("3", "1", "", 4)


def test_an_act_that_died_is_finished_instead_of_going_back_twice(harbour: Harbour, model: str, answering: None) -> None:
    """The process died after the pointer moved: the same command again finishes that act and stops there."""
    desk = harbour.desk()
    serving(harbour, desk, model)
    with pytest.raises(RuntimeError):
        carry_out_rollback(Desk(Failing(desk.store, "done"), desk.registry, desk.notary, desk.say), ask(model))
    assert serves(desk, model) == ("2", "last_known_good", "")
    document = carry_out_rollback(desk, ask(model))

    assert (document["ok"], document["outcome"]) == (True, "finished")
    assert serves(desk, model) == ("2", "last_known_good", "")
    assert desk.registry.aliases(model)["champion"] == "2"
    assert open_acts(desk.store, model) == ()


def test_finishing_twice_changes_nothing(harbour: Harbour, model: str, answering: None) -> None:
    """An act that is over may be finished again by anybody."""
    desk = harbour.desk()
    serving(harbour, desk, model)
    act_id = carry_out_rollback(desk, ask(model))["act_id"]
    before = desk.store.list("")
    finish(desk, Journal(desk.store, act_id, root="acts"))

    assert desk.store.list("") == before


def test_a_store_that_refuses_loses_nothing(harbour: Harbour, model: str, answering: None) -> None:
    """A store that answers errors is a StoreError; afterwards the same command ends right."""
    desk = harbour.desk()
    serving(harbour, desk, model)
    with pytest.raises(StoreError, match="status 503"):
        carry_out_rollback(Desk(Failing(desk.store, "intent", StoreError("status 503")), desk.registry, desk.notary, desk.say), ask(model))
    assert serves(desk, model)[0] == "3"

    assert carry_out_rollback(desk, ask(model))["ok"]
    assert serves(desk, model) == ("2", "last_known_good", "")


class Failing:
    """A store whose write of one kind of record breaks."""

    def __init__(self, store: object, kind: str, error: Exception | None = None) -> None:
        self._store, self._kind, self._error = store, f'"kind":"{kind}"'.encode(), error or RuntimeError("died")

    def put_new(self, key: str, body: bytes) -> None:
        if self._kind in body:
            raise self._error
        self._store.put_new(key, body)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


class Interrupting:
    """A store in which something happens once, right after an act was begun."""

    def __init__(self, store: object, happens: object) -> None:
        self._store, self._happens = store, [happens]

    def put_new(self, key: str, body: bytes) -> None:
        self._store.put_new(key, body)  # type: ignore[attr-defined]
        if b'"kind":"started"' in body and self._happens:
            self._happens.pop()()  # type: ignore[operator]

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


def test_an_empty_store_has_no_models(harbour: Harbour) -> None:
    """The first thing a new user may try says that there is none."""
    desk = harbour.desk(MemoryStore())
    with pytest.raises(ConfigError, match="Models: none"):
        carry_out_rollback(desk, ask("flights"))


KILLED = """
import os, signal, sys
from flows import rollback
from flows.acts import Desk
from flows.rollback import Request, carry_out_rollback
from infra.attestations import open_notary
from infra.registry import Registry
from infra.settings import load_settings
from infra.store import open_store

class Killing:
    # A store that ends its process with SIGKILL just before or just after its n-th write.
    def __init__(self, store, point):
        self.store, self.left, self.after = store, point // 2 + 1, point % 2

    def _write(self, write, *given):
        self.left -= 1
        if self.left == 0 and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        done = write(*given)
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    def put_new(self, *given):
        return self._write(self.store.put_new, *given)

    def replace(self, *given):
        return self._write(self.store.replace, *given)

    def __getattr__(self, name):
        return getattr(self.store, name)

rollback.refusal = lambda *_: ""  # it writes nothing, and a warm server of its own would take seconds
rollback.ranks.warm_up = lambda **_: None
settings = load_settings(home=sys.argv[1])
for point in map(int, sys.argv[2:]):
    child = os.fork()
    if child == 0:
        store = Killing(open_store(settings), point)
        desk = Desk(store, Registry(settings), open_notary(store, settings), lambda _: None)
        carry_out_rollback(desk, Request(model=f"boat-killed-{point}", reason="bad", by="ada"))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def killed(harbour: Harbour, points: list[int]) -> list[int]:
    """Roll back in a process of its own for each point, ended there by SIGKILL; how each ended."""
    arguments = [sys.executable, "-W", "ignore", "-c", KILLED, str(harbour.settings.home), *map(str, points)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240, check=True)
    return [int(line) for line in done.stdout.split()]


POINTS = 46  # before and after each of 23 writes: statement, 10 records twice, pointer, and one beyond the end
FEW = [4, 12]  # begun, nothing done; the pointer moved, and nothing says so yet


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(FEW, id="few"),
        *(pytest.param([*range(at, POINTS, 6)], id=f"every-6th-from-{at}", marks=pytest.mark.slow) for at in range(6)),
    ],
)
def test_killed_between_any_two_records_it_ends_right(harbour: Harbour, answering: None, points: list[int]) -> None:
    """Whatever was written when the process died: only verified versions ever serve, and the same command again ends at version 2."""
    desk = harbour.desk()
    points = [point for point in points if read_pointer(desk.store, f"boat-killed-{point}")[0] is None]
    for point in points:
        serving(harbour, desk, f"boat-killed-{point}")
    ended = killed(harbour, points)
    for point, code in zip(points, ended, strict=True):
        model = f"boat-killed-{point}"
        assert (code, serves(desk, model)) in [(code, ("3", "candidate", "2")), (code, ("2", "last_known_good", ""))], point
        document = carry_out_rollback(desk, ask(model)) if code else {"ok": True}
        # killed after "finished" was written, nothing is left to finish: the command then goes back once more, as it was asked to
        gone_on = code and document["outcome"] == "rolled_back" and document["from_version"] == "2"
        assert document["ok"]
        assert serves(desk, model) == (("1", "baseline", "") if gone_on else ("2", "last_known_good", "")), point
        assert not gone_on or point >= POINTS - 4
        assert desk.registry.aliases(model) == ({"champion": "1"} if gone_on else {"champion": "2"}) | {"baseline": "1"}, point
        assert open_acts(desk.store, model) == ()
        assert desk.registry.pages(model)[2].status == "rolled_back"
    assert [code for point, code in zip(points, ended, strict=True) if point < POINTS - 2] == [-9] * sum(p < POINTS - 2 for p in points)
