"""A version may serve on a statement whose every link holds; the first that does not is named."""

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers_proving import FAILED, FILES, LATER, NOW, RELEASE, SOON, UNSURE, Case, alter, release

from flows.proving import Proof, prove
from infra.attestations import Notary
from infra.settings import load_settings
from infra.signing import load_signer
from infra.store import evidence_key, put_blob
from validation.errors import EvidenceError
from validation.policy import GATES

ASKS = "decision: {approval: true}"


def proof(case: Case, sha256: str, files: str | None = None) -> Proof:
    """Prove a statement of this release."""
    return prove(case.notary, case.store, sha256, files_sha256=files)


def test_a_promotion_is_proven_link_by_link(tmp_path: Path) -> None:
    """Signature, every gate, the decision made again, the model's files; each link says what was seen."""
    case = release(tmp_path)
    found = proof(case, case.decide(), FILES)

    assert [link.name for link in found.links] == ["signature", *(f"gate {gate}" for gate in GATES), "decision", "model files"]
    assert all(link.ok for link in found.links)
    assert (found.kind, found.decision, found.version, found.release_id) == ("decision", "promoted", "2", RELEASE)
    assert "development key" in found.links[0].detail


@pytest.mark.parametrize("files", ["0" * 64, ""], ids=["others", "gone"])
def test_other_files_are_not_what_was_judged(tmp_path: Path, files: str) -> None:
    """The registry's files have to be the signed ones; files that are gone are not."""
    case = release(tmp_path)
    with pytest.raises(EvidenceError, match=r"link 'model files' is broken.*Restore its artifacts"):
        proof(case, case.decide(), files)


def test_no_statement_proves_nothing(tmp_path: Path) -> None:
    """A pointer without an attestation never verifies."""
    with pytest.raises(EvidenceError, match="Release again, so that its evidence is signed"):
        proof(release(tmp_path), "")


@pytest.mark.parametrize("decision", ["held", "fell_back"])
def test_a_refusal_puts_nothing_in_service(tmp_path: Path, decision: str) -> None:
    """A refused candidate's decision verifies as a document, and never as a reason to serve it."""
    case = release(tmp_path, outcomes={"scaling": FAILED})
    sha256 = case.decide(decision)

    assert proof(case, sha256).decision == decision
    with pytest.raises(EvidenceError, match=f"is '{decision}', which puts no candidate in service"):
        proof(case, sha256, FILES)


def test_a_decision_without_a_version_verifies(tmp_path: Path) -> None:
    """A release that never trained is about its gates."""
    case = release(tmp_path, outcomes={"data_contract": FAILED})

    assert proof(case, case.decide("held", version="")).files_sha256 == ""


def _evidence_altered(case: Case) -> None:
    alter(case.store, case.links["scaling"]["evidence"], b'"outcome":"pass"', b'"outcome":"fail"')


def _evidence_gone(case: Case) -> None:
    case.store.delete(evidence_key(case.links["scaling"]["evidence"]))


def _statement_altered(case: Case) -> None:
    alter(case.store, case.links["scaling"]["attestation"], b'"sig":"', b'"sig":"A')


def _statement_of_another_gate(case: Case) -> None:
    case.links["scaling"] = case.links["readiness"]


def _evidence_of_another_release(case: Case) -> None:
    case.hold("scaling", evidence_of="flights-20260101-000000-aaaa")


def _statement_of_another_release(case: Case) -> None:
    case.hold("scaling", release_id="flights-20260101-000000-aaaa")


def _outcome_changed_in_the_statement(case: Case) -> None:
    case.hold("scaling", FAILED, outcome="pass")
    case.links["scaling"]["outcome"] = "pass"


def _outcome_changed_in_the_decision(case: Case) -> None:
    case.hold("scaling", FAILED)
    case.links["scaling"]["outcome"] = "pass"


def _digests_changed(case: Case) -> None:
    case.hold("scaling", digests={"code": "other", "data": "d"})


def _other_data(case: Case) -> None:
    case.hold("scaling", bound={"code": "c", "data": "other"})


def _signed_by_a_stranger(case: Case) -> None:
    stranger = load_signer(load_settings(home=case.settings.home / "stranger"))
    honest, case.notary = case.notary, Notary(case.store, stranger, case.notary._keyring)
    case.hold("scaling")
    case.notary = honest


@pytest.mark.parametrize(
    ("tamper", "why"),
    [
        (_evidence_altered, "was altered: its bytes have sha256"),
        (_evidence_gone, "is not in the store"),
        (_statement_altered, "was altered: its bytes have sha256"),
        (_statement_of_another_gate, "is about readiness"),
        (_evidence_of_another_release, "release_id of its evidence differ"),
        (_statement_of_another_release, "of flights-20260101-000000-aaaa"),
        (_outcome_changed_in_the_statement, "pass in the statement, fail in the evidence"),
        (_outcome_changed_in_the_decision, "pass in the decision, fail in the statement"),
        (_digests_changed, "digests of its evidence differ"),
        (_other_data, "scaling judged data other, but the release is of data d"),
        (_signed_by_a_stranger, "signed by the unknown key"),
    ],
)
def test_a_gate_that_was_tampered_with_breaks_its_link(tmp_path: Path, tamper: Callable[[Case], None], why: str) -> None:
    """Whatever was changed, the gate's link is the one that is named, with the reason and a next step."""
    case = release(tmp_path)
    if tamper in (_evidence_altered, _evidence_gone, _statement_altered):
        sha256 = case.decide()
        tamper(case)
    else:
        tamper(case)
        sha256 = case.decide()

    with pytest.raises(EvidenceError, match=f"link 'gate scaling' is broken.*{why}.*(Restore|your|yours)"):
        proof(case, sha256)


@pytest.mark.parametrize(
    ("outcomes", "changed", "why"),
    [
        ({"scaling": FAILED}, {}, "scaling is fail"),
        ({"scaling": UNSURE}, {}, "scaling is inconclusive"),
        ({}, {"required": [*GATES, "more"]}, "the policy requires"),
        ({}, {"required": [*GATES, "more"], "digests": {"data": "d"}}, "more has no verdict"),
        ({}, {"required": [], "digests": {"data": "d"}}, "no gate is required"),
    ],
    ids=["failed", "inconclusive", "other-gates", "missing-gate", "no-gate"],
)
def test_a_promotion_that_the_evidence_does_not_give_is_broken(
    tmp_path: Path, outcomes: dict[str, object], changed: dict[str, object], why: str
) -> None:
    """A statement that says 'promoted' convinces nobody: the decision is made again."""
    case = release(tmp_path, outcomes=outcomes)  # type: ignore[arg-type]
    with pytest.raises(EvidenceError, match=f"link 'decision' is broken.*{why}"):
        proof(case, case.decide(**changed))


def test_a_missed_control_promotes_nothing(tmp_path: Path) -> None:
    """A gate that passed blind did not pass."""
    case = release(tmp_path)
    case.hold("scaling", caught=False)

    with pytest.raises(EvidenceError, match=r"link 'decision' is broken.*missed its control"):
        proof(case, case.decide())


def test_gates_that_judged_different_weights_are_broken(tmp_path: Path) -> None:
    """The decision is about one candidate."""
    case = release(tmp_path)
    sha256 = case.decide(subjects={"models/flights/2": FILES, "weights": "7" * 64})

    with pytest.raises(EvidenceError, match=r"link 'gates' is broken: the gates judged 2 different candidates"):
        proof(case, sha256)


def test_a_drill_never_serves(tmp_path: Path) -> None:
    """Every gate was blind to it: refused is right, promoted is broken."""
    case = release(tmp_path, drill="sign_flip")

    assert proof(case, case.decide("fell_back")).decision == "fell_back"
    with pytest.raises(EvidenceError, match="this is the drill 'sign_flip'"):
        proof(case, case.decide())


def test_a_release_that_was_overtaken_is_whole(tmp_path: Path) -> None:
    """Held although every gate passes is what a faster release leaves; a fall-back without a reason is not."""
    case = release(tmp_path)

    assert proof(case, case.decide("held")).decision == "held"
    with pytest.raises(EvidenceError, match="'fell_back' is recorded, but the evidence says"):
        proof(case, case.decide("fell_back"))


def test_a_journal_that_was_altered_breaks_the_proof(tmp_path: Path) -> None:
    """The request (drill, policy) is read from it."""
    case = release(tmp_path)
    sha256 = case.decide()
    case.store.delete(f"releases/{RELEASE}/numbers/0001")

    with pytest.raises(EvidenceError, match=r"link 'journal' is broken.*Restore releases/ from a backup"):
        proof(case, sha256)


def test_a_waiver_that_counted_carries_the_promotion(tmp_path: Path) -> None:
    """One gate failed and was waived when it was decided; that it has expired since changes nothing about that."""
    case = release(tmp_path, outcomes={"scaling": FAILED})
    found = proof(case, case.decide(waivers=[case.waive("scaling", expires_at=SOON)]))

    assert "scaling waived by Ada" in next(link.detail for link in found.links if link.name == "waiver")
    assert [item.gate for item in found.waivers] == ["scaling"]


@pytest.mark.parametrize(
    ("gate", "given", "why"),
    [
        ("scaling", {"expires_at": NOW}, "expired"),
        ("scaling", {"made_at": LATER, "expires_at": LATER}, "still to come"),
        ("scaling", {"expires_at": "2027-01-31T18:15:42+00:00"}, "the policy allows"),
        ("scaling", {"release_id": "flights-20260101-000000-aaaa"}, "it was copied here"),
        ("gradient_equivalence", {}, "the policy lets nobody waive"),
    ],
    ids=["expired", "of-the-future", "too-long", "copied", "not-waivable"],
)
def test_a_waiver_that_did_not_count_is_broken(tmp_path: Path, gate: str, given: dict[str, str], why: str) -> None:
    """A waiver is judged by the release's policy and the time of the decision."""
    case = release(tmp_path, outcomes={gate: FAILED})
    with pytest.raises(EvidenceError, match=f"link 'waiver' is broken.*{why}"):
        proof(case, case.decide(waivers=[case.waive(gate, **given)]))


def test_a_policy_that_changed_since_does_not_undo_a_waiver(tmp_path: Path) -> None:
    """Where today's defaults are not those of then, signed words are judged by their own times."""
    case = release(tmp_path, outcomes={"readiness": FAILED})
    sha256 = case.decide(waivers=[case.waive("readiness")], digests={"data": "d", "policy": "of last year"})

    assert proof(case, sha256, FILES).decision == "promoted"


def test_an_approval_carries_the_promotion(tmp_path: Path) -> None:
    """The policy asks for a person, and a named person said yes to this very basis."""
    case = release(tmp_path, policy=ASKS)

    assert "approval" in [link.name for link in proof(case, case.decide(approval=case.answer())).links]
    with pytest.raises(EvidenceError, match=r"link 'decision' is broken.*waits for a person"):
        proof(case, case.decide())


@pytest.mark.parametrize(
    ("given", "link", "why"),
    [
        ({"approved": False}, "decision", "refused by Ada"),
        ({"weights": "7" * 64}, "approval", "another candidate"),
        ({"expires_at": NOW}, "decision", "expired"),
        ({"release_id": "flights-20260101-000000-aaaa"}, "approval", "it was copied here"),
    ],
    ids=["no", "other-weights", "expired", "copied"],
)
def test_a_word_that_does_not_count_is_broken(tmp_path: Path, given: dict[str, object], link: str, why: str) -> None:
    """A no, an expired yes, or a yes to something else promotes nothing."""
    case = release(tmp_path, policy=ASKS)
    with pytest.raises(EvidenceError, match=f"link '{link}' is broken.*{why}"):
        proof(case, case.decide(approval=case.answer(**given)))  # type: ignore[arg-type]


def test_an_expired_waiver_was_shown_too(tmp_path: Path) -> None:
    """A yes binds every waiver of the evidence, also one that does not count any more."""
    case = release(tmp_path, policy=ASKS, outcomes={"scaling": FAILED})
    old, new = case.waive("scaling", expires_at=NOW), case.waive("scaling")
    sha256 = case.decide(waivers=[new], approval=case.answer((old, new)))

    assert proof(case, sha256, FILES).decision == "promoted"


def test_a_rollback_rests_on_what_admitted_the_version(tmp_path: Path) -> None:
    """The admission is proven the same way, its links under its own name."""
    case = release(tmp_path)
    found = proof(case, case.roll_back(case.decide()), FILES)

    assert [link.name for link in found.links][:3] == ["signature", "admission: signature", f"admission: gate {GATES[0]}"]
    assert (found.kind, found.release_id) == ("rollback", "flights-20260201-101010-0b0b")
    assert proof(case, case.roll_back(case.baseline("2")), FILES).kind == "rollback"


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda case: case.roll_back(case.baseline("1")), "names the admission of flights version 1"),
        (lambda case: case.roll_back(case.baseline("2", files="1" * 64)), "or of other files"),
        (lambda case: case.roll_back(case.roll_back(case.decide())), "rollback statement, which lets nothing serve"),
        (lambda case: case.roll_back(case.decide("held")), "promoted nothing"),
        (lambda case: case.roll_back(case.links["scaling"]["attestation"]), "gate statement, which lets nothing serve"),
        (lambda case: case.roll_back("0" * 64), "is not in the store"),
    ],
    ids=["other-version", "other-files", "a-rollback", "held", "a-gate", "gone"],
)
def test_a_rollback_to_what_was_never_admitted_is_broken(tmp_path: Path, made: Callable[[Case], str], why: str) -> None:
    """Its own signature is not enough."""
    case = release(tmp_path)
    with pytest.raises(EvidenceError, match=f"link 'admission: signature' is broken.*{why}"):
        proof(case, made(case))


def test_a_payload_put_into_another_envelope_is_refused(tmp_path: Path) -> None:
    """Content addressing alone would be satisfied by a forged envelope; the signature is not."""
    case = release(tmp_path, outcomes={"scaling": FAILED})
    body = case.store.get(evidence_key(case.decide("held")))
    other = case.store.get(evidence_key(case.baseline()))
    forged = body[: body.index(b'"signatures"')] + other[other.index(b'"signatures"') :]

    with pytest.raises(EvidenceError, match=r"does not fit its payload.*Restore it from a backup"):
        proof(case, put_blob(case.store, forged))


def test_a_proof_can_be_repeated(tmp_path: Path) -> None:
    """Nothing is written, and the same statement gives the same proof."""
    case = release(tmp_path)
    sha256, before = case.decide(), case.store.list("")

    assert proof(case, sha256) == proof(case, sha256)
    assert case.store.list("") == before
