"""Stalls and deaths: noticed, looked into by a child, acted on, recorded. Real loop, gloo ranks and signals; most of them `proof`."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from trainer import ranks
from trainer.blame import BLAMED, Places, blamed, hang_text, is_definite, mitigation
from trainer.config import Poison, TrainJob, parse_fault
from trainer.incidents import KEPT, Case, Seen, look_into, new_folder, write_record
from trainer.inquiry import planted
from trainer.stalls import FLOOR_S
from trainer.wires import Incident
from validation.errors import RankError
from validation.finding import Finding, Operation
from validation.records import RunRecord

READ = "infra.dumps:read_evidence"
VERDICT_S = 2.0  # after the threshold
LOADED_S = 4.0  # what a machine that runs other tests beside this one may add


@dataclass
class Ran:
    """What became of a job."""

    incidents: list[Incident] = field(default_factory=list)
    record: RunRecord | None = None
    error: str = ""

    @property
    def last(self) -> Incident:
        """The one incident's last word."""
        [last] = [incident for incident in self.incidents if incident.is_over]
        return last


def go(folder: Path, *faults: str, **changes: Any) -> Ran:
    """Twelve updates of the tiny recipe on four ranks, sealed every third one, with these faults."""
    folder.mkdir()
    usual = {
        "recipe": "tiny_recipe:long", "folder": str(folder), "world_size": 4, "steps": 12, "checkpoint_every": 3, "max_restarts": 2,
        "deadline_s": 90.0, "stall_s": 60.0, "faults": tuple(map(parse_fault, faults)),
    }  # fmt: skip
    ran = Ran()
    try:
        ran.record = ranks.run_group(TrainJob(**(usual | changes)), on_incident=ran.incidents.append, read=READ)
    except RankError as error:
        ran.error = str(error)
    return ran


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bits that an undisturbed run ends with."""
    ran = go(tmp_path_factory.mktemp("twin") / "run")
    assert ran.record is not None
    assert ran.incidents == []
    return ran.record.state_sha256


def record_of(incident: Incident) -> dict[str, Any]:
    """incident.json."""
    found: dict[str, Any] = json.loads(Path(incident.folder, "incident.json").read_text())
    return found


@pytest.mark.parametrize("world_size", [4, pytest.param(8, marks=pytest.mark.proof)])
def test_a_rank_that_left_the_order_is_named_and_the_run_goes_on(tmp_path: Path, twin: str, world_size: int) -> None:
    """One more all-reduce on the last rank: a verdict within two seconds of the threshold, a restart from the checkpoint, the same bits."""
    last = world_size - 1
    ran = go(tmp_path / "run", f"extra:rank={last},step=7", world_size=world_size)

    assert ran.record is not None
    [recovery] = ran.record.recoveries
    found = record_of(ran.last)
    assert (ran.last.verdict, ran.last.kind, ran.last.ranks) == ("hang", "op_type_mismatch", (last,))
    assert (found["mitigation"]["action"], recovery.resumed_from_step, ran.record.state_sha256) == ("restart", 6, twin)
    assert found["threshold_s"] == FLOOR_S
    assert FLOOR_S <= recovery.detect_s <= FLOOR_S + VERDICT_S + LOADED_S
    assert {f"rank{last}.hang.json", f"rank{last}.hang2.json", f"rank{last}.stack.txt", "states.json"} <= {
        path.name for path in Path(ran.last.folder).iterdir()
    }


@pytest.mark.proof
def test_a_hang_without_a_restart_ends_with_its_diagnosis(tmp_path: Path) -> None:
    """The error says who, which operation and where, what to do, and where the evidence is."""
    ran = go(tmp_path / "run", "extra:rank=1,step=7", max_restarts=0)

    assert ran.error.startswith("hang: op_type_mismatch, rank 1, at all_to_all")
    for part in ("in step 7", "Planned fault: extra:rank=1", "No restart is left", "What to do: ", str(tmp_path / "run/incidents/001")):
        assert part in ran.error
    assert record_of(ran.last)["mitigation"]["action"] == "stop"


@pytest.mark.proof
def test_a_rank_that_waits_for_data_is_waited_for_once(tmp_path: Path, twin: str) -> None:
    """It may be slow data: the first look is told and waited for, the second one ends the attempt."""
    ran = go(tmp_path / "run", "starve:rank=1,step=7", stall_floor_s=2.0)

    assert [(found.kind, found.ranks, found.is_over) for found in ran.incidents] == [
        ("dataloader_deadlock", (1,), False), ("dataloader_deadlock", (1,), True)
    ]  # fmt: skip
    assert ran.record is not None
    assert ran.record.state_sha256 == twin
    assert ran.record.recoveries[0].detect_s > 4.0


@pytest.mark.proof
def test_a_straggler_ends_nothing(tmp_path: Path, twin: str) -> None:
    """A rank that sleeps for four seconds is told, waited for, and the incident closed when it moves."""
    ran = go(tmp_path / "run", "delay:rank=2,step=10,ms=4000", stall_floor_s=2.0)

    assert ran.record is not None
    assert (ran.record.attempts, ran.record.state_sha256) == (1, twin)
    assert {found.ranks for found in ran.incidents} == {(2,)}
    assert record_of(ran.last)["mitigation"]["action"] == "wait"
    assert "moved again" in ran.last.mitigation


@pytest.mark.parametrize(
    ("fault", "kind", "rank"),
    [
        ("kill:rank=1,step=6", "dead_process", 1),
        pytest.param("error:rank=2,step=7", "exception_path", 2, marks=pytest.mark.proof),
        pytest.param("stop:rank=0,step=5", "frozen_process", 0, marks=pytest.mark.proof),
    ],
)
def test_each_death_leaves_an_incident(tmp_path: Path, twin: str, fault: str, kind: str, rank: int) -> None:
    """Killed, raised, stopped: looked into after the restart, marked as planned, with the rank and never those that lost it."""
    ran = go(tmp_path / "run", fault)

    assert ran.record is not None
    assert (ran.last.kind, ran.last.ranks, ran.record.attempts, ran.record.state_sha256) == (kind, (rank,), 2, twin)
    assert ran.last.planned.startswith(fault.partition(",")[0])
    assert "exitcodes.json" in {path.name for path in Path(ran.last.folder).iterdir()}


@pytest.mark.parametrize(("parallel", "left"), [("ddp", 3), pytest.param("fsdp2", 2, marks=pytest.mark.proof)])
def test_a_rank_blamed_twice_is_left_out(tmp_path: Path, twin: str, parallel: str, left: int) -> None:
    """The third attempt goes without its place, on fewer ranks and with the same bits; sharded ones need a power of two."""
    ran = go(tmp_path / "run", "kill:rank=1,step=6", "kill:rank=1,step=8,attempt=1", blame_planned=True, parallel=parallel)

    assert ran.record is not None
    assert ran.record.recoveries[-1].resumed_world_size == left
    assert ran.record.state_sha256 == twin
    assert f"rank 1 left out after {BLAMED} incidents: restarted on {left} of 4 ranks" in ran.incidents[-1].mitigation


@pytest.mark.proof
def test_planned_faults_leave_nobody_out(tmp_path: Path) -> None:
    """What a gate plans says nothing about a place."""
    ran = go(tmp_path / "run", "kill:rank=1,step=6", "kill:rank=1,step=8,attempt=1")

    assert ran.record is not None
    assert [recovery.resumed_world_size for recovery in ran.record.recoveries] == [4, 4]


@pytest.mark.proof
def test_the_end_says_what_was_known(tmp_path: Path) -> None:
    """A straggler that outlasts the collectives' time-out: evidence was taken before it, and the error tells what it said."""
    ran = go(tmp_path / "run", "delay:rank=1,step=7,ms=60000", stall_s=6.0, max_restarts=0)

    assert "Timed out" in ran.error
    assert "Diagnosis of the stall before: Rank 1" in ran.error
    assert (ran.last.ranks, record_of(ran.last)["mitigation"]["action"]) == ((1,), "stop")


def test_a_diagnosis_that_fails_breaks_nothing(tmp_path: Path) -> None:
    """A reader that is not there: the incident is inconclusive and says why, and the run goes on."""
    (tmp_path / "run").mkdir()
    found: list[Incident] = []
    job = TrainJob(
        recipe="tiny_recipe:long", folder=str(tmp_path / "run"), world_size=2, steps=8, checkpoint_every=3, max_restarts=1, deadline_s=60.0,
        faults=(parse_fault("kill:rank=1,step=5"),),
    )  # fmt: skip
    record = ranks.run_group(job, on_incident=found.append, read="no_such_module:read")

    assert record.attempts == 2
    assert [(incident.verdict, incident.kind) for incident in found] == [("inconclusive", "insufficient_evidence")]
    assert "ModuleNotFoundError" in found[0].text


@pytest.mark.proof
def test_what_the_listener_raises_comes_out(tmp_path: Path) -> None:
    """As with progress: the group is ended, and the caller's own error is the run's."""

    def refuse(_: Incident) -> None:
        raise KeyError("not today")

    (tmp_path / "run").mkdir()
    job = TrainJob(
        recipe="tiny_recipe:long", folder=str(tmp_path / "run"), world_size=2, steps=8, checkpoint_every=3, max_restarts=1, deadline_s=60.0,
        faults=(parse_fault("kill:rank=1,step=5"),),
    )  # fmt: skip
    with pytest.raises(KeyError, match="not today"):
        ranks.run_group(job, on_incident=refuse)


# Without ranks


def finding(**changes: Any) -> Finding:
    """Rank 2 misses an all-reduce."""
    usual = {"verdict": "hang", "kind": "missing_participant", "ranks": (2,), "explanation": "Rank 2 is gone.", "action": "look"}
    return Finding(**(usual | changes))


@pytest.mark.parametrize(
    ("changes", "looks", "definite"),
    [
        ({}, 1, False), ({}, 2, True), ({"kind": "op_type_mismatch"}, 1, True), ({"confidence": "low"}, 5, False),
        ({"verdict": "straggler", "kind": "late_rank"}, 5, False),
        ({"kind": "all_ranks_same_op"}, 1, False), ({"kind": "all_ranks_same_op"}, 2, True), ({"verdict": "inconclusive"}, 3, False),
    ],
    ids=["absent", "still absent", "left the order", "unsure", "late", "maybe slow", "still there", "unknown"],
)  # fmt: skip
def test_only_a_sure_hang_ends_an_attempt(changes: dict[str, Any], looks: int, definite: bool) -> None:
    """Slowness and doubt are waited for; a hang that looks like slowness needs two looks."""
    assert is_definite(finding(**changes), looks=looks) == definite


@pytest.mark.parametrize(
    ("changes", "who"),
    [
        ({}, (2,)), ({"ranks": (1, 2)}, ()), ({"confidence": "low"}, ()), ({"verdict": "straggler"}, ()),
        ({"kind": "exception_path", "evidence": ("ValueError: no such column",)}, ()),
        ({"kind": "exception_path", "evidence": ("RuntimeError: CUDA error: uncorrectable ECC error",)}, (2,)),
    ],
    ids=["one rank", "several", "unsure", "slow", "the program's own exception", "the machine's"],
)  # fmt: skip
def test_a_place_is_blamed_for_what_it_may_have_done(changes: dict[str, Any], who: tuple[int, ...]) -> None:
    """An exception of the program comes again wherever its samples go; one that speaks of the device is the place's."""
    assert blamed(finding(**changes)) == who


def test_places_are_left_out_and_one_stays() -> None:
    """Two blames leave a place out, a corrected one does not, and the last place is never left out."""
    places = Places(3)
    for incident, place in ((1, 1), (2, 1), (3, 0), (4, 0), (4, None)):
        places.blame(incident, place)
    assert (places.left_out, places.seats(3, "ddp"), places.seats(2, "ddp"), places.seats(1, "ddp")) == ((1,), (0, 2), (0, 2), (0,))

    alone = Places(1, {1: 0, 2: 0})
    assert alone.seats(1, "ddp") == (0,)


def test_mitigation_in_words() -> None:
    """What is done is said with the number of ranks."""
    assert mitigation(is_last=False, left_out=[], world_size=2, next_size=2).text == "restarted on 2 ranks from the last sealed checkpoint"
    assert mitigation(is_last=True, left_out=[1], world_size=2, next_size=1).action == "stop"


def test_a_job_that_was_made_to_fail_is_planned(tmp_path: Path) -> None:
    """A poisoned micro-batch and a planted wrong line are a gate's own doing: their end is no news."""
    job = TrainJob(recipe="none", folder=str(tmp_path), world_size=2)

    assert planted(job) == ""
    assert planted(replace(job, poison=Poison(kind="overflow", rank=1, step=2))) == "poison: overflow on rank 1 at step 2"
    assert planted(replace(job, defect="divide_twice")) == "planted defect: divide_twice"


def test_a_hang_in_a_few_words() -> None:
    """Kind, who, which operation, where."""
    at = Operation(op="all_reduce", seq=7, group="0", where="loop.py:88 train_step")
    assert hang_text(finding(collective=at, step=3)) == (
        "hang: missing_participant, rank 2, at all_reduce 7 of group 0 in step 3 (loop.py:88 train_step)"
    )


def test_old_incidents_make_room(tmp_path: Path) -> None:
    """A run's folder keeps the newest ones; numbers go on."""
    for _ in range(KEPT + 5):
        new_folder(tmp_path)[1].mkdir(parents=True)
    standing = sorted(path.name for path in (tmp_path / "incidents").iterdir())

    assert (len(standing), standing[0], standing[-1]) == (KEPT, "006", f"{KEPT + 5:03d}")
    assert new_folder(tmp_path, reserved=[40])[0] == 41


def test_a_rank_that_was_stopped_early_is_named(tmp_path: Path) -> None:
    """Nobody waited for it yet, so the records show nothing; the leader saw the stop."""
    seen = tuple(
        Seen(rank=rank, pid=2**22 + rank, log=tmp_path / "log", ring=tmp_path / f"{rank}.ring", state="ST"[rank]) for rank in (0, 1)
    )
    [found] = look_into([Case(folder=tmp_path / "incident", number=1, attempt=0, world_size=2, ranks=seen, is_over=True)], READ)

    assert (found.verdict, found.kind, found.ranks) == ("hang", "frozen_process", (1,))
    assert found.explanation.startswith("Rank 1 was stopped")


def test_no_ring_no_verdict(tmp_path: Path) -> None:
    """Ranks that recorded nothing give an inconclusive finding, and the record can be written."""
    seen = tuple(Seen(rank=rank, pid=2**22 + rank, log=tmp_path / "log", ring=tmp_path / f"{rank}.ring") for rank in range(2))
    case = Case(folder=tmp_path / "incident", number=1, attempt=0, world_size=2, ranks=seen, is_over=True)

    [found] = look_into([case], READ)
    write_record(case, found, mitigation(is_last=True, left_out=[], world_size=2, next_size=2))

    assert found.verdict == "inconclusive"
    assert json.loads((case.folder / "incident.json").read_text())["finding"]["verdict"] == "inconclusive"
