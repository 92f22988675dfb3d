"""Drills: one for every failure mode, judged strictly, kept with the code's digest; the drills themselves are `proof`, a sample is not."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import drill_records, drills
from flows.checking import plan_of
from flows.cli import main
from flows.drill_records import keep, on_record
from flows.drill_release import RECIPE
from flows.drill_scenes import SCENES, STEP, Scene, fault, is_kept, is_named
from flows.drill_stage import Ran, Stage
from flows.drilling import drills as all_drills
from flows.drilling import is_good, job_maker, line_of, play, run_drills
from flows.probes import Bench
from validation.errors import ConfigError, StoreError
from validation.failure_modes import default_modes
from validation.policy import parse_policy
from validation.readiness import judge_readiness
from validation.records import Drill, FallbackCheck

SAMPLE = ("mismatched_arguments", "full_disk", "store_away", "bad_release_served")
GOOD = Drill(name="hang", fired=True, detected=True, mitigated=True, detail="as planned", seconds=1.5, made_at="2030-01-01T00:00:00+00:00")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """One stage for all drills of this module: its twins are played once."""
    return Stage(job_maker(tmp_path_factory.mktemp("stage")))


@pytest.mark.parametrize(
    "name", [pytest.param(mode.drill, marks=() if mode.drill in SAMPLE else pytest.mark.proof) for mode in default_modes()]
)
def test_drill_fires_is_seen_and_the_promise_is_kept(name: str, stage: Stage) -> None:
    """The failure is caused for real; its detector names it, and what the registry promises happens."""
    drill = play(name, all_drills()[name], stage)

    assert (drill.name, drill.fired, drill.detected, drill.mitigated) == (name, True, True, True), drill.detail


def test_every_mode_has_its_drill() -> None:
    """In the registry's order, none left over."""
    assert list(all_drills()) == [mode.drill for mode in default_modes()]


def finding(kind: str = "dataloader_deadlock", ranks: tuple[int, ...] = (1,), *, step: int | None = STEP, verdict: str = "hang") -> Any:
    return {"kind": kind, "ranks": list(ranks), "step": step, "verdict": verdict}


def ran(*findings: Any, deaths: str = "", record: Any = None, error: str = "", world_sizes: tuple[int, ...] = (2, 2)) -> Ran:
    """What a run left, by hand."""
    lines = [{"kind": "attempt", "world_size": size} for size in world_sizes]
    lines += [{"kind": "death", "fault": "f", "what": deaths}] if deaths else []
    incidents = tuple({"finding": one} for one in findings)
    return Ran(folder=Path(), record=record, error=error, incidents=incidents, lines=tuple(lines), seconds=1.0)


STARVED = SCENES["loader_deadlock"][0]


@pytest.mark.parametrize(
    ("found", "seen"),
    [
        pytest.param(ran(finding()), True, id="right"),
        pytest.param(ran(finding(step=None)), True, id="no step said"),
        pytest.param(ran(), False, id="nothing said"),
        pytest.param(ran(finding("missing_participant")), False, id="other kind"),
        pytest.param(ran(finding(ranks=(0,))), False, id="the rank that waits"),
        pytest.param(ran(finding(ranks=(0, 1))), False, id="everybody"),
        pytest.param(ran(finding(step=STEP + 1)), False, id="other step"),
        pytest.param(ran(finding(ranks=(0,)), finding()), True, id="right at the second look"),
    ],
)
def test_detection_is_the_right_kind_rank_and_step(found: Ran, seen: bool) -> None:
    """A finding that blames the waiting rank, or another step, is no detection."""
    assert is_named(STARVED, found) is seen


def test_words_of_the_leader_count_only_where_a_scene_has_them() -> None:
    """A crash loop is told in words; a starved loader has to be found."""
    words = ran(deaths="crash loop of rank 1: dataloader_deadlock")

    assert is_named(SCENES["crash_loop"][0], words)
    assert not is_named(STARVED, words)


@pytest.mark.parametrize("verdict", ["hang", "crash"])
def test_a_calm_run_that_is_called_a_hang_is_a_false_alarm(verdict: str) -> None:
    """`healthy` may be said, nothing else that ends a run."""
    scene = SCENES["false_alarm"][0]

    assert is_named(scene, ran(finding("healthy", (), verdict="healthy")))
    assert not is_named(scene, ran(finding("frozen_process", verdict=verdict)))


class Twin(Stage):
    """A stage whose twin is known."""

    def __init__(self) -> None:
        super().__init__(job_maker(Path()))

    def twin(self, **_: int) -> Any:
        return SimpleNamespace(state_sha256="a", ledger_sha256="b")


def record(state: str = "a", ledger: str = "b") -> Any:
    return SimpleNamespace(state_sha256=state, ledger_sha256=ledger, unsaved=(), recoveries=())


@pytest.mark.parametrize(
    ("promise", "left", "kept"),
    [
        pytest.param("same bits", ran(record=record()), True, id="back with the twin's bits"),
        pytest.param("same bits", ran(record=record("x")), False, id="other state"),
        pytest.param("same bits", ran(record=record(ledger="x")), False, id="other samples"),
        pytest.param("same bits", ran(record=record(), world_sizes=(2,)), False, id="never restarted"),
        pytest.param("same bits", ran(error="gone"), False, id="never came back"),
        pytest.param("same bits on fewer ranks", ran(record=record(), world_sizes=(2, 2, 1)), True, id="left out"),
        pytest.param("same bits on fewer ranks", ran(record=record()), False, id="not left out"),
        pytest.param("unharmed", ran(record=record(), world_sizes=(2,)), True, id="left alone"),
        pytest.param("unharmed", ran(record=record()), False, id="ended for nothing"),
        pytest.param("stopped", ran(error="crash loop", world_sizes=(2,) * 4), True, id="stopped early"),
        pytest.param("stopped", ran(error="spent", world_sizes=(2,) * 10), False, id="all restarts used up"),
        pytest.param("stopped", ran(record=record()), False, id="went through"),
    ],
)
def test_promise_is_checked(promise: Any, left: Ran, kept: bool) -> None:
    """Each promise is seen broken as well."""
    scene = Scene(faults=(fault("kill"),), promise=promise)

    assert is_kept(scene, left, Twin(), {"world_size": 2, "steps": 10, "max_restarts": 9}) is kept


def test_a_drill_that_breaks_has_shown_nothing(stage: Stage) -> None:
    """Whatever it raises; the other drills are still run."""

    def broken(_: Stage) -> Drill:
        raise StoreError("no store")

    drill = play("store_away", broken, stage)

    assert (drill.fired, drill.detected, drill.mitigated) == (False, False, False)
    assert "the drill itself broke: StoreError: no store" in drill.detail


def test_record_is_kept_and_read_back(tmp_path: Path) -> None:
    """The last one of a name counts."""
    keep(tmp_path, replace(GOOD, detected=False))
    keep(tmp_path, GOOD)

    assert on_record(tmp_path) == (GOOD,)
    assert on_record(tmp_path / "nowhere") == ()


def test_record_of_other_code_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A detector that was changed since has to be drilled again; so has one whose record is torn."""
    keep(tmp_path, GOOD)
    (tmp_path / "drills" / "torn.json").write_text('{"version": 1')
    (tmp_path / "drills" / "list.json").write_text("[]")
    assert on_record(tmp_path) == (GOOD,)
    monkeypatch.setattr(drill_records, "_code", lambda: "other")

    assert on_record(tmp_path) == ()


def test_unknown_drill_is_refused_before_anything_is_run(tmp_path: Path) -> None:
    """With the list of what there is."""
    with pytest.raises(ConfigError, match=r"there is no drill 'hangs', so nothing was run\. Choose out of: rank_killed"):
        run_drills(["hang", "hangs"], tmp_path, say=print)


def test_broken_drill_is_shown_kept_and_its_runs_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line says what is wrong, the document too, and the folder of the runs is not thrown away."""

    def played(stage: Stage) -> Drill:
        Path(stage.make_job("run", world_size=1).folder, "log").touch()
        return replace(GOOD, mitigated=False, detail="promise broken")

    monkeypatch.setattr("flows.drilling.drills", lambda: {"hang": played})
    said: list[str] = []
    document = run_drills([], tmp_path, say=said.append)

    assert document["broken"] == ["hang"]
    assert "NO" in said[1]
    assert "promise broken" in said[1]
    assert Path(document["folder"], "01-run", "log").exists()
    assert [drill.mitigated for drill in on_record(tmp_path)] == [False]
    assert is_good(GOOD)
    assert "NO" not in line_of(GOOD)


def test_command_lists_refuses_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`--list` needs nothing; no name at all is exit 2; a broken drill is exit 1, and `--json` says which."""
    monkeypatch.setenv("SEATRIAL_HOME", str(tmp_path))
    monkeypatch.setattr("flows.drilling.drills", lambda: {"hang": lambda _: replace(GOOD, detected=False)})
    assert main(["drill", "--list", "--json"]) == 0
    assert [row["drill"] for row in json.loads(capsys.readouterr().out)] == [mode.drill for mode in default_modes()]
    assert main(["drill"]) == 2
    assert main(["drill", "hang", "--all"]) == 2
    capsys.readouterr()
    code = main(["drill", "hang", "--json"])
    document = json.loads(capsys.readouterr().out)

    assert code == 1
    assert (document["broken"], document["drills"][0]["passed"]) == (["hang"], False)


def test_runbook_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An index and a page a mode."""
    assert main(["runbook", "--into", str(tmp_path), "--json"]) == 0
    pages = json.loads(capsys.readouterr().out)

    assert len(pages) == len(default_modes()) + 1
    assert all(Path(page).read_text().startswith("# ") for page in pages)


@pytest.mark.proof
def test_a_release_fires_its_own_drills_and_takes_records_for_the_others(tmp_path: Path) -> None:
    """Hang, skipped collective and torn checkpoint are fired again; a record counts for a mode that no release fires, and only for one."""
    plan = plan_of(RECIPE, ("kill_and_resume",), (1, 2), tmp_path, "")
    for name in ("fabric", "hang"):
        keep(plan.home, replace(GOOD, name=name, detected=False))
    bench = Bench(plan=plan, gate="readiness", say=lambda _: None, folder=plan.folder / "readiness")
    fallbacks = (FallbackCheck(kind="baseline", version="1", loaded=True, predicted=True, detail="asked"),)
    records = drills.probe_readiness(bench, {}, fallbacks)
    verdict = judge_readiness(records, parse_policy().readiness)

    assert plan.home == tmp_path
    assert {drill.name: is_good(drill) for drill in records.drills} == {
        "hang": True, "skipped_collective": True, "torn_checkpoint": True, "fabric": False,
    }  # fmt: skip
    assert "fabric was drilled, detected and mitigated" in [item.name for item in verdict.checks if item.passed is False]
