"""Whole releases as a user makes them: the command in a process of its own, the example recipe, embedded defaults.

One story in order, because each chapter needs what the one before left: a first release that fails scaling and may only serve with a
waiver and a person's yes, a second one over it, a drill, re-runs, a refusal, and the way back.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
from helpers_release import COMMAND_S, EXAMPLE, POLICY, STRICT, Yard
from moto.server import ThreadedMotoServer

from infra.journal import Journal
from infra.pointer import read_pointer
from infra.settings import load_settings
from infra.store import get_evidence, open_store

pytestmark = pytest.mark.timeout(2 * COMMAND_S)


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Yard:
    home = tmp_path_factory.mktemp("a yard") / "the home"
    home.mkdir()
    (home / "policy.yaml").write_text(POLICY)
    (home / "strict.yaml").write_text(STRICT)
    return Yard(home)


@pytest.fixture(scope="module")
def refused(yard: Yard) -> Any:
    """The first release: scaling does not pass."""
    code, document, shown = yard.release(policy="strict.yaml")
    assert code == 3, shown[-3000:]
    return document


@pytest.fixture(scope="module")
def regated(yard: Yard, refused: Any) -> Any:
    """A gate of it that passed is held again."""
    code, document, shown = yard.seatrial("gate", "data_contract", "--release", refused["release_id"])
    assert code == 3, shown[-3000:]
    return document


@pytest.fixture(scope="module")
def waived(yard: Yard, regated: Any) -> Any:
    """Somebody takes the risk of scaling."""
    words = ("--by", "Ada", "--reason", "one small machine", "--days", "7")
    code, document, shown = yard.seatrial("waive", "scaling", "--release", regated["release_id"], *words)
    assert (code, document["ok"]) == (3, False), shown[-3000:]  # recorded, and held: a person's yes is missing
    return document


@pytest.fixture(scope="module")
def first(yard: Yard, waived: Any) -> Any:
    """The decision after somebody said yes."""
    code, document, shown = yard.seatrial("approve", waived["release_id"], "--by", "Grace", "--reason", "I read the report")
    assert (code, document["said"]) == (0, "approved"), shown[-3000:]
    return document["decision"]


@pytest.fixture(scope="module")
def second(yard: Yard, first: Any) -> Any:
    code, document, shown = yard.release()
    assert code == 0, shown[-3000:]
    return document


@pytest.fixture(scope="module")
def drill(yard: Yard, second: Any) -> Any:
    code, document, shown = yard.release("--drill", "slice-regression")
    assert code == 3, shown[-3000:]
    return document


def by_name(document: Any) -> dict[str, Any]:
    """The gates of a document."""
    return {gate["name"]: gate for gate in document["gates"]}


def test_a_first_release_that_fails_scaling_leaves_the_baseline_in_service(refused: Any) -> None:
    """Five gates pass, one refuses: the named baseline serves."""
    assert (refused["decision"], refused["serving"]) == ("fell_back", {"kind": "baseline", "version": "1"})
    assert [gate["name"] for gate in refused["gates"] if gate["outcome"] != "pass"] == ["scaling"]


def test_holding_one_gate_again_holds_those_that_did_not_pass_too(refused: Any, regated: Any) -> None:
    """Asked for data_contract: it and scaling have a second attempt, the others say why they were kept, with the same candidate."""
    gates = by_name(regated)

    assert [name for name, gate in gates.items() if gate["attempt"] == 2] == ["data_contract", "scaling"]
    assert all("all match" in gate["reuse_reason"] for gate in gates.values() if gate["attempt"] == 1)
    assert regated["candidate_version"] == refused["candidate_version"]


def test_a_waived_gate_is_kept_and_the_release_waits_for_a_person(waived: Any) -> None:
    """Nothing is held again: the failure stands in the evidence, the candidate does not serve yet, and the command is named."""
    decided = waived["decision"]

    assert (decided["decision"], decided["serving"]["kind"]) == ("held", "baseline")
    assert all(gate["reused"] for gate in decided["gates"])
    assert "seatrial approve" in decided["action"]


def test_a_yes_promotes_on_the_condition(yard: Yard, refused: Any, first: Any) -> None:
    """The waived candidate serves, and both people stand in the reason."""
    assert (first["decision"], first["serving"]["version"]) == ("promoted", refused["candidate_version"])
    assert all(gate["reused"] for gate in first["gates"])
    assert "one small machine" in first["reason"]


def test_the_journal_tells_the_whole_story_in_order(yard: Yard, refused: Any, first: Any) -> None:
    """Each effect has its intent before and its done after; three decisions, of which the last one moved the pointer."""
    kinds = yard.kinds(refused["release_id"])
    begun = ["started", "gate data_contract"]
    for effect in ("register_baseline", "serve_baseline"):
        begun += [f"intent {effect}", f"done {effect}"]
    publication = ["intent publish", "done publish", "intent mirror", "done mirror", "decided"]
    again = ["candidate", "decision"]

    assert kinds == [
        *begun, "gate gradient_equivalence", "gate kill_and_resume", "intent register_candidate", "done register_candidate", "candidate",
        "gate scaling", "gate slice_quality", "gate readiness", "decision", *publication,
        "gate data_contract", "candidate", "gate scaling", "decision", *publication,
        "waiver scaling", "candidate", "approval_requested", "decision", *publication,
        "approval", *again, "intent promote", "done promote", *publication,
    ]  # fmt: skip


@pytest.mark.parametrize("what", ["release", "model"])
def test_what_stands_behind_a_release_and_behind_what_serves_verifies(yard: Yard, first: Any, what: str) -> None:
    """Every link holds: journal, evidence, signatures, people's words, pointer, files, aliases."""
    code, document, shown = yard.seatrial("verify", first["release_id"] if what == "release" else "digits")

    assert (code, document["problems"]) == (0, []), shown[-3000:]


def test_a_release_whose_gates_all_pass_is_promoted(second: Any) -> None:
    """Each gate passed, and caught the defect that was planted in it."""
    assert second["decision"] == "promoted"
    assert [gate["outcome"] for gate in second["gates"]] == ["pass"] * 6
    assert all(gate["control"]["caught"] for gate in second["gates"])


def test_every_gates_evidence_is_in_the_store_and_verifies(yard: Yard, first: Any) -> None:
    """The evidence is addressed by its own sha256, and says what the document says."""
    store = yard.store()
    for gate in first["gates"]:
        assert get_evidence(store, gate["sha256"])["verdict"]["outcome"] == gate["outcome"]


def test_the_report_is_one_file_that_loads_nothing(first: Any) -> None:
    """The report stands on its own: pictures inline, no address outside it."""
    page = Path(first["report"]).read_text()

    assert "data:image/png;base64," in page
    assert 'src="http' not in page
    assert "<script" not in page


def test_the_second_release_takes_over_from_the_first(yard: Yard, first: Any, second: Any) -> None:
    """The new version is champion, the version before is last known-good, the baseline stays."""
    pointer, _ = read_pointer(yard.store(), "digits")
    aliases = yard.client().get_registered_model("digits").aliases

    assert pointer is not None
    assert pointer.serving_version == second["serving"]["version"]
    assert {alias: str(version) for alias, version in aliases.items()} == {
        "champion": second["serving"]["version"],
        "last-known-good": first["serving"]["version"],
        "baseline": "1",
    }


def test_the_drill_falls_back_and_names_the_slice(yard: Yard, second: Any, drill: Any) -> None:
    """A candidate that is really worse on one slice is refused by slice_quality, and what served goes on serving."""
    failed = {gate["name"]: gate for gate in drill["gates"]}["slice_quality"]

    assert (drill["decision"], failed["outcome"]) == ("fell_back", "fail")
    assert drill["serving"] == {"kind": "last_known_good", "version": second["serving"]["version"]}
    assert any(check["passed"] is False and "=" in check["where"] for check in failed["checks"])
    assert failed["reason"] in drill["reason"]
    assert "broke this candidate on purpose" in drill["action"]


def test_the_refused_version_says_why_on_its_page(yard: Yard, drill: Any) -> None:
    """The registry has the refused version, tagged, described in words, without an alias, its model without pickle."""
    version = yard.client().get_model_version("digits", drill["candidate_version"])
    paths = [path.name for path in (yard.home / "mlartifacts").rglob("*") if path.is_file()]

    assert version.tags["status"] == "refused"
    assert str(version.description).startswith("Refused in drill slice-regression: ")
    assert "slice_quality failed" in str(version.description).splitlines()[0]
    assert not version.aliases
    assert any(name.endswith(".pt2") for name in paths)
    assert not any(name.endswith((".pkl", ".pth", ".pickle")) for name in paths)


def test_a_gate_is_held_again_alone_and_decided_again(yard: Yard, second: Any, drill: Any) -> None:
    """Scaling runs a second time, visibly; the other gates keep their evidence and say why; the decision stands on all six."""
    code, document, shown = yard.seatrial("gate", "scaling", "--release", second["release_id"])

    gates = by_name(document)
    assert code == 0, shown[-3000:]
    assert (gates["scaling"]["attempt"], gates["scaling"]["reused"]) == (2, False)
    assert all(gate["reused"] and "all match" in gate["reuse_reason"] for name, gate in gates.items() if name != "scaling")
    assert document["candidate_version"] == second["candidate_version"]


def test_show_tells_the_same_story(yard: Yard, first: Any, drill: Any) -> None:
    """`show ID --json` is the release's own document, with every attempt; `show --json` lists what serves and all releases."""
    code, document, _ = yard.seatrial("show", drill["release_id"])
    _, overview, _ = yard.seatrial("show")
    _, attempts, _ = yard.seatrial("show", first["release_id"])

    assert (code, document) == (0, drill)
    assert [row["decision"] for row in overview["releases"]] == ["fell_back", "promoted", "promoted"]
    assert {gate: len(held) for gate, held in attempts["attempts"].items()} == {"data_contract": 2, "scaling": 2}


@pytest.mark.slow
def test_data_that_breaks_its_contract_holds_back_everything_after_it(yard: Yard, drill: Any) -> None:
    """A release whose data contract fails trains nothing, says which gates were not run, and leaves the serving version alone."""
    before, _ = read_pointer(yard.store(), "digits")

    code, document, shown = yard.release(recipe="late_digits:recipe")

    assert code == 3, shown[-3000:]
    assert [gate["outcome"] for gate in document["gates"]] == ["fail"] + ["inconclusive"] * 5
    assert read_pointer(yard.store(), "digits")[0] == before
    assert (document["decision"], document["serving"]["version"]) == ("fell_back", before.serving_version if before else "")


def test_the_way_back_is_verified_and_registry_and_pointer_stay_in_step(yard: Yard, first: Any, second: Any, drill: Any) -> None:
    """`rollback` puts the version before in service, under a statement of its own; `reconcile` finds nothing to mend; all verifies."""
    code, document, shown = yard.seatrial("rollback", "digits", "--reason", "clerks complain")
    after, reconciled, words = yard.seatrial("reconcile")
    verified, proof, _ = yard.seatrial("verify", "digits")

    assert (code, document["outcome"]) == (0, "rolled_back"), shown[-3000:]
    assert (document["from_version"], document["serving"]["version"]) == (second["serving"]["version"], first["serving"]["version"])
    assert (after, [item["state"] for item in reconciled["models"]]) == (0, ["in_step"]), words[-3000:]
    assert (verified, proof["problems"]) == (0, [])


@pytest.mark.slow
def test_a_candidate_that_cannot_be_registered_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Its serving module answers NaN: the gates that need it are inconclusive and say why, the baseline serves, exit 3."""
    (tmp_path / "policy.yaml").write_text(POLICY)

    code, document, shown = Yard(tmp_path).release(recipe="nan_digits:recipe")

    gates = by_name(document) if document else {}
    assert code == 3, shown[-3000:]
    assert (document["decision"], document["serving"]["kind"]) == ("fell_back", "baseline")
    assert "the candidate could not be made" in gates["slice_quality"]["reason"]
    assert gates["gradient_equivalence"]["outcome"] == "pass"


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupt_ends_a_release_at_once_and_leaves_no_process(tmp_path: Path, signum: signal.Signals) -> None:
    """Ctrl-C at a terminal reaches the whole group, SIGTERM the command: exit 1 within seconds, with the release's name and what goes on
    with it; ranks, servers and helpers are gone.
    """
    (tmp_path / "policy.yaml").write_text(POLICY)
    yard = Yard(tmp_path)
    with (tmp_path / "err").open("w+") as err:
        command = [sys.executable, "-m", "flows.cli", "release", "digits:recipe", "--policy", str(tmp_path / "policy.yaml")]
        run = subprocess.Popen(command, cwd=EXAMPLE, env=yard.environment(), stdout=err, stderr=err, start_new_session=True)
        until = time.monotonic() + COMMAND_S
        while "data_contract: PASS" not in (tmp_path / "err").read_text():
            assert run.poll() is None, (tmp_path / "err").read_text()[-3000:]
            assert time.monotonic() < until
            time.sleep(0.2)
        (os.killpg if signum == signal.SIGINT else os.kill)(run.pid, signum)

        assert run.wait(timeout=60) == 1
    assert re.search(rf"stopped by {signum.name}; .*`seatrial finish digits-\S+` goes on", (tmp_path / "err").read_text())
    _, alive = psutil.wait_procs(yard.processes(), timeout=5)
    assert alive == []


def test_a_first_release_that_is_refused_at_once_is_held_and_leaves_its_history_in_s3(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the store in a bucket, and nothing verified that could serve: held, exit 3, journal and evidence in the bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        settings = {
            "SEATRIAL_STORE": "s3://trial/a/prefix",
            "SEATRIAL_STORE_ENDPOINT": f"http://{host}:{port}",
            "SEATRIAL_STORE_REGION": "us-east-1",
        }
        credentials = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        for name, value in (settings | credentials).items():
            monkeypatch.setenv(name, value)
        boto3.client("s3", endpoint_url=settings["SEATRIAL_STORE_ENDPOINT"], region_name="us-east-1").create_bucket(Bucket="trial")
        (tmp_path / "policy.yaml").write_text(POLICY)

        code, document, shown = Yard(tmp_path, settings | credentials).release(recipe="late_digits:recipe")

        store = open_store(load_settings(home=tmp_path))
        assert (code, document["decision"]) == (3, "held"), shown[-3000:]
        assert [entry.kind for entry in Journal(store, document["release_id"]).records()] == [
            "started", *["gate"] * 6, "decision", "intent", "done", "decided",
        ]  # fmt: skip
        assert get_evidence(store, document["gates"][0]["sha256"])["verdict"]["outcome"] == "fail"
    finally:
        server.stop()
