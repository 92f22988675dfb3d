"""Releases whose process is killed, in a real release of the example: what serves verifies at every moment, and anybody can go on.

One story: a first release is stopped and killed in a gate; whoever finishes it is killed right after the decision; the next one between
the pointer's move and the pages; the one after that brings it to its end. Another release is killed and abandoned.
"""

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers_release import COMMAND_S, POLICY, Yard, stopped_when

from flows.conduct import Document
from validation.policy import GATES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * COMMAND_S)]


@dataclass(kw_only=True)
class Death:
    """What was seen after one of the processes was killed."""

    kinds: list[str]  # the journal's
    shown: Document  # `seatrial show ID`
    serves: str  # version
    serves_by: str  # release id


@dataclass
class Sea:
    """A yard in which processes die."""

    yard: Yard
    folder: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def stop(self, *arguments: str, when: Callable[[], Any]) -> subprocess.Popen[str]:
        """Start a command and stop it as soon as something is so."""
        log = self.folder / f"{len(self.running)}.log"
        self.running.append(process := self.yard.start(*arguments, log=log))
        stopped_when(process, when, log)
        return process

    def kill(self, process: subprocess.Popen[str], release_id: str) -> Death:
        """SIGKILL, and look."""
        os.kill(process.pid, signal.SIGKILL)
        process.wait(COMMAND_S)
        pointer = self.yard.pointer()
        code, shown, words = self.yard.seatrial("show", release_id)
        assert code == 0, words
        serves, by = (pointer.serving_version, pointer.release_id) if pointer else ("", "")
        return Death(kinds=self.yard.kinds(release_id), shown=shown, serves=serves, serves_by=by)

    def reached(self, record: str) -> Callable[[], bool]:
        """Whether the newest release has a record of this kind."""

        def has() -> bool:
            found = self.yard.releases()[-1:]
            return bool(found) and record in self.yard.kinds(found[0])

        return has


@pytest.fixture(scope="module")
def sea(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("a sea")
    home = folder / "the home"
    home.mkdir()
    (home / "policy.yaml").write_text(POLICY)
    own = Sea(Yard(home), folder)
    yield own
    for process in own.running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def living(sea: Sea) -> tuple[subprocess.Popen[str], str, dict[str, tuple[int, Any, str]]]:
    """A release that stands still in its second gate, and what is said to whoever wants to have it."""
    release = ("release", "digits:recipe", "--policy", str(sea.yard.home / "policy.yaml"))
    process = sea.stop(*release, when=sea.reached("gate gradient_equivalence"))
    [release_id] = sea.yard.releases()
    commands = {"finish": ("finish", release_id), "abandon": ("abandon", release_id, "--reason", "too slow")}
    commands["gate"] = ("gate", "scaling", "--release", release_id)
    return process, release_id, {name: sea.yard.seatrial(*words) for name, words in commands.items()}


@pytest.fixture(scope="module")
def in_a_gate(sea: Sea, living: Any) -> Death:
    return sea.kill(living[0], living[1])


@pytest.fixture(scope="module")
def at_the_decision(sea: Sea, living: Any, in_a_gate: Death) -> Death:
    process = sea.stop("finish", living[1], when=sea.reached("decision"))
    return sea.kill(process, living[1])


@pytest.fixture(scope="module")
def before_the_pages(sea: Sea, living: Any, at_the_decision: Death) -> Death:
    process = sea.stop("finish", living[1], when=sea.reached("done promote"))
    return sea.kill(process, living[1])


@pytest.fixture(scope="module")
def ended(sea: Sea, living: Any, before_the_pages: Death) -> Document:
    code, document, shown = sea.yard.seatrial("finish", living[1])
    assert code == 0, shown[-3000:]
    return dict(document)


@pytest.mark.parametrize("command", ["finish", "abandon", "gate"])
def test_a_living_release_is_left_alone(living: Any, command: str) -> None:
    """Who works on it is named, by number; nothing is done."""
    process, _, answers = living
    code, document, words = answers[command]

    assert (code, document) == (1, None)
    assert f"is worked on by process {process.pid}" in words
    assert "Traceback" not in words


def test_a_release_that_died_in_a_gate_says_how_far_it_came(in_a_gate: Death) -> None:
    """Two gates are judged, the baseline serves, and the next command is named."""
    assert (in_a_gate.shown["decision"], in_a_gate.serves) == ("unfinished", "1")
    assert [gate["name"] for gate in in_a_gate.shown["gates"]] == list(GATES[:2])
    assert "seatrial finish" in in_a_gate.shown["action"]


def test_a_release_that_died_after_its_decision_serves_nothing_new_yet(at_the_decision: Death) -> None:
    """The baseline serves still; gates that were judged before the first death were not held again."""
    gates = [kind for kind in at_the_decision.kinds if kind.startswith("gate")]

    assert at_the_decision.serves == "1"
    assert gates == [f"gate {gate}" for gate in GATES]
    assert "decided" not in at_the_decision.kinds


def test_a_release_that_died_after_the_pointer_moved_serves_already(living: Any, before_the_pages: Death) -> None:
    """Its candidate serves, verified; the pages do not say so yet."""
    assert (before_the_pages.serves, before_the_pages.serves_by) == ("2", living[1])
    assert "decided" not in before_the_pages.kinds


def test_the_fourth_process_brings_it_to_its_end(sea: Sea, living: Any, ended: Document) -> None:
    """Each effect once, promoted, page and alias in step; finishing it once more changes nothing."""
    kinds = sea.yard.kinds(living[1])
    again, document, _ = sea.yard.seatrial("finish", living[1])
    verified, proof, _ = sea.yard.seatrial("verify", living[1])

    champion = sea.yard.client().get_model_version_by_alias("digits", "champion")
    assert (ended["decision"], str(champion.version)) == ("promoted", "2")
    assert len([kind for kind in kinds if kind.startswith("done")]) == len(
        {kind for kind in kinds if kind.startswith("done")}
    )  # no effect was done twice
    assert (again, document, sea.yard.kinds(living[1])) == (0, ended, kinds)
    assert (verified, proof["problems"]) == (0, [])


def test_what_the_dead_left_running_is_ended(sea: Sea, ended: Document) -> None:
    """Ranks and servers of four processes, three of them killed: all are gone after the last command."""
    _, alive = psutil.wait_procs(sea.yard.processes(), timeout=15)

    assert alive == []


def test_a_release_that_died_can_be_abandoned(sea: Sea, ended: Document) -> None:
    """It ends without a decision, for a reason; what serves stays, and nothing goes on with it."""
    known = len(sea.yard.releases())
    release = ("release", "digits:recipe", "--policy", str(sea.yard.home / "policy.yaml"))
    process = sea.stop(*release, when=lambda: len(sea.yard.releases()) > known and sea.reached("started")())
    release_id = sea.yard.releases()[-1]
    sea.kill(process, release_id)

    code, _, words = sea.yard.seatrial("abandon", release_id, "--reason", "wrong data")
    _, shown, _ = sea.yard.seatrial("show", release_id)
    after, _, refusal = sea.yard.seatrial("finish", release_id)
    pointer = sea.yard.pointer()

    assert code == 0, words
    assert (shown["decision"], pointer and pointer.serving_version) == ("abandoned", "2")
    assert "wrong data" in shown["reason"]
    assert (after, "was abandoned (wrong data)" in refusal) == (2, True)
    assert psutil.wait_procs(sea.yard.processes(), timeout=15)[1] == []
