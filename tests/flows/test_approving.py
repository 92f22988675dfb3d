"""A person's word is checked, signed, bound to what was there, and read back; the form waits for it outside any process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers_approving import ASKS, RELEASE_ID, held, own_settings, release_of

from flows import finishing
from flows.approval_form import Question, await_person, form_for
from flows.approving import approve, lines, waive
from flows.clock import utc_now
from flows.people import (
    approval_of,
    basis_of,
    checked_answer,
    days_later,
    people_of,
    record_approval,
    request_approval,
    waivers_of,
)
from infra.attestations import open_notary
from infra.journal import Journal
from infra.settings import Settings
from infra.store import open_store
from validation.errors import ConfigError, ConflictError, EvidenceError
from validation.policy import GATES, parse_policy
from validation.statements import WAIVER
from validation.verdict import Outcome
from validation.waivers import standing

ANSWER: dict[str, Any] = {"by": "Ada", "reason": "read the report"}
WAIVES: dict[str, Any] = {"gate": "scaling", "by": "Ada", "reason": "one device for now", "days": 10.0}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A home of the test's own, where another process works on every release, so that nothing is decided here."""
    monkeypatch.setattr(finishing, "finish", busy)
    return own_settings(tmp_path)


def busy(*_: Any, **__: Any) -> dict[str, Any]:
    """What `finish` does while a living process works on the release."""
    raise ConflictError("process 7 works on it")


def asked(settings: Settings, **given: Any) -> tuple[Journal, str]:
    """A release that waits for a person, and what it asks about."""
    journal, notary, policy = release_of(settings, policy=given.pop("policy", ASKS), **given)
    basis = basis_of(journal, notary)
    request_approval(journal, basis, policy)
    return journal, basis


def say(_: str) -> None:
    """Nobody listens."""


def test_a_yes_is_signed_bound_and_read_back(settings: Settings) -> None:
    """Name, reason, basis and the wait stand in a statement whose signature verifies, and the release is approved by it."""
    journal, basis = asked(settings)
    document = approve(settings, say=say, release_id=RELEASE_ID, **ANSWER)
    people = people_of(journal, open_notary(open_store(settings), settings), parse_policy(ASKS), now=utc_now())

    assert (document["ok"], document["said"], document["basis"], document["human_review_s"] >= 0) == (True, "approved", basis, True)
    assert standing(people).state == "approved"
    assert people.approval is not None
    assert (people.approval.by, people.approval.attestation) == ("Ada", document["attestation"])
    assert lines(document)[-1] == f"next: `seatrial finish {RELEASE_ID}`, unless the process that works on it decides with this"


def test_a_no_is_recorded_as_done(settings: Settings) -> None:
    """Refusing is what was asked for: it ends well, and the release stands refused."""
    journal, _ = asked(settings)
    document = approve(settings, say=say, release_id=RELEASE_ID, refuse=True, **ANSWER)
    people = people_of(journal, open_notary(open_store(settings), settings), parse_policy(ASKS), now=utc_now())

    assert (document["ok"], document["said"], document["expires_at"]) == (True, "refused", "")
    assert standing(people).words.startswith("refused by Ada")


def test_a_later_word_stands_for_an_earlier_one(settings: Settings) -> None:
    """A no to the same evidence can be taken back, and both stay in the journal."""
    journal, _ = asked(settings)
    approve(settings, say=say, release_id=RELEASE_ID, refuse=True, **ANSWER)
    approve(settings, say=say, release_id=RELEASE_ID, by="Grace", reason="the freeze is over")
    people = people_of(journal, open_notary(open_store(settings), settings), parse_policy(ASKS), now=utc_now())

    assert standing(people).words.startswith("approved by Grace")
    assert [entry.payload["approved"] for entry in journal.records() if entry.kind == "approval"] == [False, True]


def test_evidence_after_the_question_asks_anew(settings: Settings) -> None:
    """A gate that was held again takes the question, and a yes that was given, away."""
    journal, basis = asked(settings)
    approve(settings, say=say, release_id=RELEASE_ID, **ANSWER)
    notary = open_notary(open_store(settings), settings)
    held(journal, open_store(settings), notary, "scaling", again=True)

    assert basis_of(journal, notary) != basis
    assert standing(people_of(journal, notary, parse_policy(ASKS), now=utc_now())).state == "waiting"
    with pytest.raises(ConfigError, match=r"changed since a person was asked .*seatrial finish"):
        approve(settings, say=say, release_id=RELEASE_ID, **ANSWER)


def test_a_question_is_asked_once(settings: Settings) -> None:
    """However often the flow comes by, and anew when nobody answered for a week."""
    journal, notary, policy = release_of(settings, policy=ASKS)
    basis = basis_of(journal, notary)
    old = days_later(utc_now(), -7.0)
    journal.append("approval_requested", {"basis": basis, "requested_at": old}, time_utc=old)
    with pytest.raises(ConfigError, match=r"longer ago than the policy's 7 days.*seatrial finish"):
        approve(settings, say=say, release_id=RELEASE_ID, **ANSWER)

    first = request_approval(journal, basis, policy)

    assert first > old
    assert request_approval(journal, basis, policy) == first
    assert sum(entry.kind == "approval_requested" for entry in journal.records()) == 2


def test_a_waiver_binds_the_gates_very_evidence(settings: Settings) -> None:
    """It is signed over that digest, counts for it, and no longer once the gate was held again."""
    journal, notary, policy = release_of(settings)
    document = waive(settings, say=say, release_id=RELEASE_ID, **WAIVES)
    people = people_of(journal, notary, policy, now=utc_now())

    assert notary.read(document["attestation"], WAIVER).subjects == {"evidence": document["evidence"]}
    assert [item.attestation for item in people.counting] == [document["attestation"]]
    assert lines(document)[:2] == [
        f"scaling (inconclusive) is waived by Ada until {document['expires_at'][:10]} {document['expires_at'][11:16]} UTC.",
        "It said: scaling said so",
    ]
    held(journal, open_store(settings), notary, "scaling", Outcome.FAIL)
    assert people_of(journal, notary, policy, now=utc_now()).counting == ()


def test_a_waiver_after_the_question_asks_anew(settings: Settings) -> None:
    """Who said yes to six gates did not say yes to five and a waiver."""
    journal, basis = asked(settings)
    waive(settings, say=say, release_id=RELEASE_ID, **WAIVES)

    assert basis_of(journal, open_notary(open_store(settings), settings)) != basis


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"gate": "vibes"}, r"no gate 'vibes'.*Choose one of", id="unknown-gate"),
        pytest.param({"release_id": "digits-20260310-110000-zz99"}, r"no release .*seatrial show", id="unknown-release"),
        pytest.param({"release_id": "../../etc"}, r"not a release id.*seatrial show", id="no-release-id"),
        pytest.param({"gate": "slice_quality"}, r"slice_quality cannot be waived .*scaling, readiness", id="critical"),
        pytest.param({"gate": "readiness"}, r"readiness passed .*nothing to waive", id="passed"),
        pytest.param({"days": 0.0}, r"--days of at least a minute .*at most 30", id="no-days"),
        pytest.param({"days": 30.001}, r"30.001 days.*at most 30", id="too-many-days"),
        pytest.param({"days": float("nan")}, r"nan days is not possible", id="nan-days"),
        pytest.param({"days": float("inf")}, r"inf days is not possible", id="endless"),
        pytest.param({"by": " \t"}, r"the name is empty.*give a name", id="nobody"),
        pytest.param({"by": "Ada\x1b[31m"}, r"printable", id="not-printable"),
        pytest.param({"by": "A" * 121}, r"121 characters", id="long-name"),
        pytest.param({"reason": ""}, r"the reason is empty.*give a reason", id="no-reason"),
    ],
)
def test_a_waiver_that_cannot_be(settings: Settings, changes: dict[str, Any], words: str) -> None:
    """Each is refused with the way on, and leaves no record."""
    journal, notary, _ = release_of(settings)

    with pytest.raises(ConfigError, match=words):
        waive(settings, say=say, **{"release_id": RELEASE_ID, **WAIVES, **changes})
    assert waivers_of(journal, notary) == ()


def test_only_the_releases_own_policy_says_what_may_be_waived(settings: Settings) -> None:
    """A policy that names a gate waivable, or does not require one, is the one that the release was started with."""
    release_of(settings, policy="required: [data_contract, readiness]\ndecision: {waivable: [scaling, readiness, slice_quality]}")

    with pytest.raises(ConfigError, match="does not require scaling"):
        waive(settings, say=say, release_id=RELEASE_ID, **WAIVES)


def test_a_gate_that_was_never_held_cannot_be_waived(settings: Settings) -> None:
    """What is missing has no evidence to take a risk on."""
    journal = Journal(open_store(settings), RELEASE_ID)
    journal.append("started", {"request": {"recipe": "digits", "policy_text": "", "drill": ""}, "model": "digits"}, time_utc=utc_now())

    with pytest.raises(ConfigError, match=r"was not held .*seatrial gate scaling --release"):
        waive(settings, say=say, release_id=RELEASE_ID, **WAIVES)


@pytest.mark.parametrize(
    ("kind", "payload", "words"),
    [
        pytest.param("decided", {"decision": "promoted"}, r"already promoted.*seatrial rollback digits", id="decided"),
        pytest.param("decision", {"decision": {"decision": "promoted"}}, r"already promoted", id="being-promoted"),
        pytest.param("abandoned", {"reason": "machine lost"}, r"was abandoned.*Release again", id="abandoned"),
    ],
)
def test_a_release_that_is_over_takes_no_word(settings: Settings, kind: str, payload: dict[str, Any], words: str) -> None:
    """Neither a yes nor a waiver."""
    journal, _ = asked(settings)
    journal.append(kind, payload, time_utc=utc_now())

    with pytest.raises(ConfigError, match=words):
        approve(settings, say=say, release_id=RELEASE_ID, **ANSWER)
    with pytest.raises(ConfigError, match=words):
        waive(settings, say=say, release_id=RELEASE_ID, **WAIVES)


def test_a_release_that_asks_nobody_takes_no_yes(settings: Settings) -> None:
    """By its policy, or since it has not come so far."""
    release_of(settings)
    with pytest.raises(ConfigError, match=r"asks for no approval.*decision.approval: true"):
        approve(settings, say=say, release_id=RELEASE_ID, **ANSWER)

    other = "digits-20260310-110000-cd34"
    release_of(settings, policy=ASKS, release_id=other)
    with pytest.raises(ConfigError, match=r"has not come so far.*seatrial finish"):
        approve(settings, say=say, release_id=other, **ANSWER)


def test_a_drill_takes_no_word(settings: Settings) -> None:
    """A candidate that was broken on purpose serves on nobody's word."""
    release_of(settings, drill="slice-regression")

    with pytest.raises(ConfigError, match="may never serve"):
        waive(settings, say=say, release_id=RELEASE_ID, **WAIVES)


def test_a_statement_about_another_release_counts_for_nothing(settings: Settings) -> None:
    """Copying a signed waiver or yes into another journal is found out."""
    release_of(settings)
    copied = waive(settings, say=say, release_id=RELEASE_ID, **WAIVES)["attestation"]
    journal, notary, _ = release_of(settings, release_id="digits-20260310-120000-cd34")
    journal.append("waiver", {"attestation": copied}, time_utc=utc_now())

    with pytest.raises(EvidenceError, match=r"is about release digits-20260310-110000-ab12"):
        waivers_of(journal, notary)


def test_a_forged_record_counts_for_nothing(settings: Settings, tmp_path: Path) -> None:
    """A waiver signed by a key that nobody trusts stops the release instead of promoting it."""
    journal, notary, policy = release_of(settings)
    foreign = own_settings(tmp_path / "elsewhere").model_copy(update={"store": settings.store})
    forger = open_notary(open_store(settings), foreign)
    evidence = people_of(journal, notary, policy, now=utc_now()).evidence["scaling"]
    forged = {"release_id": RELEASE_ID, "gate": "scaling", "by": "Ada", "reason": "x", "made_at": utc_now(),
              "expires_at": days_later(utc_now(), 1.0), "evidence": evidence}  # fmt: skip
    journal.append("waiver", {"attestation": forger.attest(WAIVER, {"evidence": evidence}, forged)}, time_utc=utc_now())

    with pytest.raises(EvidenceError, match="unknown key"):
        people_of(journal, notary, policy, now=utc_now())


def test_evidence_that_was_edited_cannot_be_approved_or_waived(settings: Settings) -> None:
    """A person vouches for bytes that verify or for nothing."""
    journal, _ = asked(settings)
    sha256 = next(entry.payload["evidence"] for entry in journal.records() if entry.kind == "gate" and entry.payload["gate"] == "scaling")
    path = Path(settings.store) / "evidence" / "sha256" / sha256
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"inconclusive", b"pass"))

    with pytest.raises(EvidenceError, match=sha256[:12]):
        approve(settings, say=say, release_id=RELEASE_ID, **ANSWER)
    with pytest.raises(EvidenceError, match=sha256[:12]):
        waive(settings, say=say, release_id=RELEASE_ID, **WAIVES)


def test_one_command_says_and_decides(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """`approve` ends with the release's new decision, and with its exit."""
    asked(settings)
    held_still = {"ok": False, "decision": "held", "action": "release again"}
    monkeypatch.setattr(finishing, "finish", lambda *_, release_id, **__: {**held_still, "release_id": release_id})
    document = approve(settings, say=say, release_id=RELEASE_ID, **ANSWER)

    assert (document["ok"], document["next"]) == (False, "release again")


def test_outside_a_deployment_nobody_is_waited_for(settings: Settings) -> None:
    """A release by hand asks, says the command to type and is held; once a yes is there it is taken."""
    journal, notary, policy = release_of(settings, policy=ASKS)
    said: list[str] = []
    basis = basis_of(journal, notary)
    question = Question(journal=journal, notary=notary, policy=policy, basis=basis, description="", say=said.append)

    assert await_person(question) is None
    assert f"seatrial approve {RELEASE_ID} --by NAME --reason ..." in said[0]
    record_approval(journal, notary, basis, checked_answer("Ada", "fine", approved=True, days=1.0, made_at=utc_now()))
    assert await_person(question) == approval_of(journal, notary, basis)
    assert sum(entry.kind == "approval_requested" for entry in journal.records()) == 1


def test_a_yes_to_what_nobody_asked_is_refused(settings: Settings) -> None:
    """The wait of a person is measured from a question on record."""
    journal, notary, _ = release_of(settings, policy=ASKS)

    with pytest.raises(ConfigError, match=r"nobody asked .*seatrial finish"):
        record_approval(journal, notary, "0" * 64, checked_answer("Ada", "x", approved=True, days=1.0, made_at=utc_now()))


def test_the_form_keeps_to_the_policy() -> None:
    """Name and reason are needed, a yes has to be said, and its days end where the policy's do."""
    schema = form_for(parse_policy("decision: {approval_days: 3}"), "read first").model_json_schema()

    assert schema["required"] == ["name", "reason"]
    assert schema["properties"]["approve"]["default"] is False
    assert (schema["properties"]["days"]["maximum"], schema["properties"]["days"]["default"]) == (3.0, 3.0)
    assert json.dumps(schema)  # the server keeps it as JSON


def test_the_commands_need_no_framework(tmp_path: Path) -> None:
    """A typing error is answered at once: exit code 2, a way on, and neither Prefect nor MLflow nor torch was imported."""
    code = (
        "import sys; from flows.cli import main; "
        "code = main(['waive', 'vibes', '--release', 'digits-20260310-110000-ab12', '--by', 'Ada', '--reason', 'x', '--days', '1']); "
        "print(code, sorted({'prefect', 'mlflow', 'torch'} & set(sys.modules)))"
    )
    environment = {**os.environ, "SEATRIAL_HOME": str(tmp_path / "home")}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)

    assert run.stdout == "2 []\n"
    assert "there is no gate 'vibes', so nothing was waived. Choose one of: data_contract" in run.stderr


def test_every_gate_is_bound(settings: Settings) -> None:
    """Holding any gate again changes what is approved."""
    journal, notary, _ = release_of(settings)
    seen = {basis_of(journal, notary)}
    for gate in GATES:
        held(journal, open_store(settings), notary, gate, again=gate)
        seen.add(basis_of(journal, notary))

    assert len(seen) == 1 + len(GATES)
