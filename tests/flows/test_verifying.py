"""`seatrial verify`: a release, an act, a model; what is whole is said, what is not is named with its reason."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers_proving import FAILED, MODEL, NOW, RELEASE, SOON, Case, alter, release

from flows.verifying import lines, verify
from infra.attestations import open_notary
from infra.journal import Journal
from infra.pointer import Pointer, admit, move_pointer, pointer_key, read_pointer
from infra.registry import Registry
from infra.settings import load_settings
from infra.store import evidence_key, open_store
from validation.errors import ConfigError
from validation.statements import BASELINE, DECISION, model_subject

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # MLflow's own


def verified(case: Case, what: str = RELEASE) -> dict[str, Any]:
    """The document, which always has lines for people."""
    document = verify(case.settings, say=lambda _: None, what=what)
    assert lines(document)[0] == document["headline"]
    assert document["ok"] == (not document["problems"])
    json.dumps(document)
    return document


def test_a_promoted_release_verifies(tmp_path: Path) -> None:
    """Journal, gates, decision; who signed is said."""
    case = release(tmp_path)
    case.decide()
    case.journal.append("decided", {"decision": "promoted"}, time_utc=NOW)
    document = verified(case)

    assert document["ok"]
    assert "promoted, signed by development key" in document["headline"]
    assert {"journal", "gate scaling, attempt 1", "decision: gate scaling", "decision: decision"} <= {
        row["name"] for row in document["links"]
    }
    assert document["notes"] == ["flights version 2 does not serve now"]


def test_a_refused_release_verifies(tmp_path: Path) -> None:
    """What was refused is evidence too."""
    case = release(tmp_path, outcomes={"scaling": FAILED})
    case.decide("held")

    assert verified(case)["ok"]
    assert "not carried out yet: `seatrial finish" in verified(case)["headline"]


def test_an_unfinished_release_verifies_as_far_as_it_came(tmp_path: Path) -> None:
    """No decision is no fault; a record of it without a signature is."""
    case = release(tmp_path)

    assert verified(case)["ok"]
    assert "decided nothing yet (its last record is 'gate')" in verified(case)["headline"]
    case.journal.append("decided", {"decision": "promoted"}, time_utc=NOW)
    assert "no signed decision" in verified(case)["problems"][0]


def test_an_attempt_that_was_never_signed_is_named(tmp_path: Path) -> None:
    """With the command that mends it."""
    case = release(tmp_path)
    link = {**case.links["scaling"], "attestation": ""}
    case.journal.append("gate", {"gate": "scaling", "attempt": 2, **link}, time_utc=NOW)

    assert [problem for problem in verified(case)["problems"] if f"seatrial gate scaling --release {RELEASE}" in problem]


@pytest.mark.parametrize("what", ["evidence", "attestation"])
def test_a_tampered_gate_breaks_its_attempt_and_the_decision(tmp_path: Path, what: str) -> None:
    """Both say which gate, and the rest is looked at all the same."""
    case = release(tmp_path)
    case.decide()
    alter(case.store, case.links["scaling"][what], b"a", b"b")
    document = verified(case)

    assert not document["ok"]
    assert [row["name"] for row in document["links"] if not row["ok"]] == ["gate scaling, attempt 1", "decision"]
    assert "link 'gate scaling' is broken" in document["problems"][1]
    assert "was altered" in document["problems"][1]
    assert any(line.startswith("  BROKEN gate scaling") for line in lines(document))


def test_a_journal_record_that_was_altered_is_named(tmp_path: Path) -> None:
    """Without its history nothing else is said of a release."""
    case = release(tmp_path)
    case.store.delete(f"releases/{RELEASE}/numbers/0003")
    document = verified(case)

    assert document["problems"][0].startswith("journal: the journal of release")


def test_a_journal_that_says_another_decision_is_named(tmp_path: Path) -> None:
    """The record says promoted, the signed statement says held."""
    case = release(tmp_path)
    sha256 = case.decide("held")
    case.journal.append("decision", {"decision": {"decision": "promoted"}, "attestation": sha256}, time_utc=NOW)

    assert "the journal says 'promoted', but the signed decision is 'held'" in verified(case)["problems"][0]


def test_a_word_that_was_copied_from_another_release_is_named(tmp_path: Path) -> None:
    """Also when the decision does not rest on it."""
    case = release(tmp_path, outcomes={"scaling": FAILED})
    case.waive("scaling", release_id="flights-20260101-000000-aaaa")

    assert "it was copied here" in verified(case)["problems"][0]


def test_a_report_that_was_altered_is_named(tmp_path: Path) -> None:
    """What people read is kept by its digest as well."""
    case = release(tmp_path)
    report = case.links["scaling"]["evidence"]
    case.journal.append("decision", {"decision": {"decision": "promoted"}, "attestation": case.decide(), "report": "0" * 64}, time_utc=NOW)

    assert report
    assert [problem for problem in verified(case)["problems"] if problem.startswith("report: ")]


@pytest.mark.parametrize("what", ["flights-20260101-000000-aaaa", "nobody", "../flights", "", "x" * 500])
def test_what_is_not_there_is_an_input_error(tmp_path: Path, what: str) -> None:
    """Exit code 2, with what there is."""
    with pytest.raises(ConfigError, match=r"nothing was verified.*seatrial show"):
        verified(release(tmp_path), what)


def test_verifying_a_release_writes_nothing_and_needs_no_private_key(tmp_path: Path) -> None:
    """An auditor has the public half only, and the store may be read-only."""
    case = release(tmp_path)
    case.decide()
    (case.settings.home / "keys" / "development.pem").unlink()
    before = sorted(case.settings.home.rglob("*"))

    assert verified(case)["ok"]
    assert sorted(case.settings.home.rglob("*")) == before


def test_neither_torch_nor_prefect_nor_mlflow_is_imported(tmp_path: Path) -> None:
    """A release is verified from the store alone, within about a second."""
    case = release(tmp_path)
    case.decide()
    code = (
        "import sys; from flows.verifying import verify; from infra.settings import load_settings\n"
        "found = verify(load_settings(home=sys.argv[1]), say=print, what=sys.argv[2])\n"
        "assert found['ok'], found; sys.exit(bool({'torch', 'prefect', 'mlflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(case.settings.home), RELEASE], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stderr) == (0, "")


# --- what a model serves -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose registry was migrated, which takes seconds."""
    home = tmp_path_factory.mktemp("registry") / "home"
    Registry(load_settings(home=home))
    return home


@pytest.fixture
def case(tmp_path: Path, migrated: Path) -> Case:
    """Baseline 1, last known-good 2 and promoted 3, with files in the registry, admissions, pointer and aliases."""
    home = tmp_path / "home"
    shutil.copytree(migrated, home)
    settings = load_settings(home=home)
    made = release(tmp_path)
    made.settings = settings
    registry = Registry(settings)
    registry._client.create_registered_model(MODEL)
    for number in "123":
        (home / "versions" / number).mkdir(parents=True)
        (home / "versions" / number / "MLmodel").write_text(f"version: {number}\n")
        registry._client.create_model_version(MODEL, source=str(home / "versions" / number))
    admitted(made, registry, "1", baseline=True)
    admitted(made, registry, "2")
    last = admitted(made, registry, "3")
    first = Pointer(
        model=MODEL, serving_version="3", serving_kind="candidate", last_known_good="2", baseline="1", release_id=RELEASE, sequence=3,
        attestation=last,
    )  # fmt: skip
    move_pointer(made.store, first, None)
    registry.mirror(first)
    return made


def admitted(case: Case, registry: Registry, version: str, *, baseline: bool = False, **changed: Any) -> str:
    """Let a version through."""
    subjects = {model_subject(MODEL, version): registry.files(MODEL, version)}
    if baseline:
        said = {"release_id": RELEASE, "model": MODEL, "version": version, "digests": {}, "made_at": NOW}
        return admit(case.store, MODEL, version, case.notary.attest(BASELINE, subjects, said))
    return admit(case.store, MODEL, version, case.decide(version=version, subjects=subjects, **changed))


def moved(case: Case, **changed: Any) -> None:
    """Move the pointer by hand, and let the aliases follow."""
    pointer, etag = read_pointer(case.store, MODEL)
    assert pointer is not None
    now = replace(pointer, **changed)
    move_pointer(case.store, now, etag)
    Registry(case.settings).mirror(now)


def broken(case: Case) -> list[str]:
    """Names of the broken links of the model."""
    return [row["name"] for row in verified(case, MODEL)["links"] if not row["ok"]]


def test_a_model_that_serves_verifies(case: Case) -> None:
    """Pointer, statement, files, both fallbacks and the aliases."""
    document = verified(case, MODEL)

    assert document["problems"] == []
    names = {row["name"] for row in document["links"]}
    assert {"pointer", "serving: model files", "last known-good: model files", "baseline: model files", "journal", "aliases"} <= names
    assert "flights version 3 serves as candidate" in document["headline"]


@pytest.mark.parametrize(("version", "role"), [("3", "serving"), ("2", "last known-good"), ("1", "baseline")])
def test_altered_or_lost_model_files_are_named(case: Case, version: str, role: str) -> None:
    """Of what serves and of what it would fall back to."""
    file = case.settings.home / "versions" / version / "MLmodel"
    file.write_text("version: 4\n")
    assert broken(case) == [role]
    file.unlink()
    assert broken(case)[0].startswith(role)


@pytest.mark.parametrize("alias", ["champion", "last-known-good", "baseline"])
def test_an_alias_that_was_moved_by_hand_is_reported(case: Case, alias: str) -> None:
    """With both versions, and the command that mends it."""
    client = Registry(case.settings)._client
    client.delete_registered_model_alias(MODEL, alias)
    assert f"alias '{alias}' names nothing" in verified(case, MODEL)["problems"][0]
    client.set_registered_model_alias(MODEL, alias, "2" if alias != "last-known-good" else "1")
    assert "`seatrial reconcile` mends it" in verified(case, MODEL)["problems"][0]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"attestation": ""}, "nothing signed stands behind this version"),
        ({"serving_version": "2", "last_known_good": ""}, "this is not the model that was judged"),
        ({"release_id": "flights-20260101-000000-aaaa"}, "its statement is of flights-20260131-181542-3f9c"),
        ({"last_known_good": "9"}, "no release ever let it serve"),
    ],
    ids=["unsigned", "other-version", "other-release", "unknown-fallback"],
)
def test_a_pointer_that_was_edited_is_named(case: Case, changed: dict[str, str], why: str) -> None:
    """Whatever is put into it, it has to agree with what was signed."""
    moved(case, **changed)

    assert any(why in problem for problem in verified(case, MODEL)["problems"])


@pytest.mark.parametrize(("body", "why"), [(b"{}", "is not a pointer"), (None, "is gone")])
def test_a_pointer_that_cannot_be_read_is_named(case: Case, body: bytes | None, why: str) -> None:
    """What serves cannot be told from it."""
    _, etag = case.store.get_with_etag(pointer_key(MODEL))
    if body is None:
        case.store.delete(pointer_key(MODEL))
    else:
        case.store.replace(pointer_key(MODEL), body, etag)

    assert why in verified(case, MODEL)["problems"][0]


def test_a_gate_that_was_tampered_with_breaks_what_serves(case: Case) -> None:
    """The model's chain ends at the evidence."""
    alter(case.store, case.links["slice_quality"]["evidence"], b"pass", b"fail")

    assert broken(case) == ["serving", "last known-good"]


def test_a_rolled_back_model_verifies(case: Case) -> None:
    """By the act's statement and the admission it names."""
    act, found = "flights-20260201-101010-0b0b", case.store.get("models/flights/admitted/2")
    sha256 = case.notary.attest(
        "urn:sea-trial:rollback:1", case.notary.read(json.loads(found)["attestation"], DECISION).subjects,
        {
            "act_id": act, "model": MODEL, "version": "2", "kind": "last_known_good", "from_version": "3", "reason": "worse", "by": "Ada",
            "admission": json.loads(found)["attestation"], "made_at": NOW,
        },
    )  # fmt: skip
    changed = {"serving_version": "2", "serving_kind": "last_known_good", "last_known_good": "", "release_id": act, "attestation": sha256}
    moved(case, **changed)
    assert "the history of flights-20260201-101010-0b0b, which moved the pointer, is gone" in verified(case, MODEL)["problems"][0]

    pointer = {"serving_version": "2", "attestation": sha256}
    steps = [{"effect": "fall_back", "plan": {"pointer": pointer}}]
    Journal(case.store, act, root="acts").append("started", {"act": "rollback", "model": MODEL, "steps": steps}, time_utc=NOW)
    assert verified(case, MODEL)["problems"] == []
    assert "act flights-20260201-101010-0b0b (rollback), not finished" in verified(case, act)["headline"]
    assert verified(case, act)["ok"]


def test_a_waiver_that_expired_since_is_a_note(case: Case) -> None:
    """It counted when it was decided; whoever asks today hears of it."""
    case.hold("scaling", FAILED)
    registry = Registry(case.settings)
    (case.settings.home / "versions" / "4").mkdir()
    (case.settings.home / "versions" / "4" / "MLmodel").write_text("version: 4\n")
    registry._client.create_model_version(MODEL, source=str(case.settings.home / "versions" / "4"))
    sha256 = admitted(case, registry, "4", waivers=[case.waive("scaling", expires_at=SOON)])
    moved(case, serving_version="4", last_known_good="", attestation=sha256, sequence=4)
    document = verified(case, MODEL)

    assert document["ok"]
    assert "serves on a waiver that expired" in document["notes"][0]


def test_a_key_that_was_revoked_breaks_everything_it_signed(case: Case) -> None:
    """Another installation trusts none of it, and says which key."""
    stranger = load_settings(home=case.settings.home.parent / "other", store=str(case.settings.store))
    open_notary(open_store(stranger), stranger)
    document = verify(stranger, say=lambda _: None, what=RELEASE)

    assert not document["ok"]
    assert "signed by the unknown key" in document["problems"][0]
    assert evidence_key(case.links["scaling"]["evidence"])
