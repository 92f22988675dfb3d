"""Drills of what a release depends on: data, gradients, slices, versions, checkpoints and their copy in the store."""

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from flows.checking import check_gate, plan_of
from flows.drill_scenes import STEPS
from flows.drill_stage import Stage
from infra.mirror import Mirror
from infra.mirror_fetch import fetch
from infra.pointer import Pointer, ServingKind, move_pointer, read_pointer
from infra.store_folder import FolderStore
from trainer import ranks
from trainer.config import Fault
from trainer.describe import RecipeFacts
from trainer.seal_key import seal_key
from validation.contract import judge_contract
from validation.decision import ReleaseDecision, decide
from validation.errors import RankError
from validation.expectations import build_contract_records
from validation.policy import parse_policy
from validation.records import Drill, FallbackCheck, SliceRecords
from validation.slices import judge_slices, plant
from validation.verdict import GateVerdict, Outcome

RECIPE = "trainer.drill_recipe:recipe"
CALL_S = 300.0
WORTH_STEPS = 200  # updates after which the drill recipe is better than its rule
MODEL = "drill"


def torn_checkpoint(stage: Stage) -> Drill:
    """SIGKILL while a checkpoint is being written: the torn one must not be trusted, the run must end with the twin's bytes.

    Rank 0 dies with every file of checkpoint 6 on disk and no seal. Saves run behind training, one after the other: checkpoint 3 was sealed
    before 6 was begun, however far training had come.
    """
    fault = Fault(kind="kill", rank=0, step=5, phase="seal")
    ran = stage.play("torn", world_size=2, steps=STEPS, checkpoint_every=3, faults=(fault,), max_restarts=1)
    twin = stage.twin(world_size=2, steps=STEPS)
    recoveries = ran.record.recoveries if ran.record else ()
    resumed = recoveries[0].resumed_from_step if recoveries else -1
    is_same = ran.record is not None and (ran.record.state_sha256, ran.record.ledger_sha256) == (twin.state_sha256, twin.ledger_sha256)
    return Drill(
        name="torn_checkpoint", fired=str(fault) in ran.fired, detected=resumed == 3, mitigated=is_same, seconds=ran.seconds,
        detail=f"killed while checkpoint 6 was written, resumed from sealed checkpoint {resumed}, final bytes "
        + ("equal the twin's" if is_same else f"differ from the twin's {ran.error}".rstrip()),
    )  # fmt: skip


def store_away(stage: Stage) -> Drill:
    """The store is no folder when a run is mirrored; it comes back, and the copy brings the run back."""
    began = time.monotonic()
    ran = stage.play("mirrored", world_size=1, steps=4, checkpoint_every=2)
    away, key = ran.folder.with_suffix(".store"), seal_key()
    away.write_text("a file where the store should be")
    mirror = Mirror(FolderStore(away), ran.folder, "drill", key=key)
    mirror.sync(last=True)
    problems, early = list(mirror.problems), list(mirror.uploaded)
    away.unlink()
    mirror.sync(last=True)
    back = ran.folder.with_suffix(".back")
    fetched = fetch(FolderStore(away), "drill", back, key=key)
    is_back = ran.record is not None and 4 in mirror.uploaded and fetched.step == 4
    return Drill(
        name="store_away", fired=not early, detected=bool(problems), mitigated=is_back, seconds=time.monotonic() - began,
        detail=f"{(problems or ['no problem was told'])[0][:200]}; then uploaded {mirror.uploaded}, fetched {fetched.step}",
    )  # fmt: skip


def wrong_gradient(stage: Stage) -> Drill:
    """gradient_equivalence on the drill recipe, and its positive control."""
    began = time.monotonic()
    plan = plan_of(RECIPE, ("gradient_equivalence",), (1, 2), folder_of(stage, "gradient"), "")
    verdict, _, worker_seconds = check_gate(plan, "gradient_equivalence", lambda _: None)
    stage.worker_seconds += worker_seconds
    return of_control("wrong_gradient", verdict, time.monotonic() - began)


def bad_data(stage: Stage) -> Drill:
    """data_contract on the drill recipe's frames, and its positive control."""
    began, folder = time.monotonic(), folder_of(stage, "data")
    facts: RecipeFacts = ranks.call("trainer.describe:describe", RECIPE, str(folder), deadline_s=CALL_S)
    frames = {split: pd.read_parquet(folder / f"{split}.parquet") for split in ("train", "judge")}
    return of_control("bad_data", judge_contract(build_contract_records(frames, facts.contract)), time.monotonic() - began)


def slice_regression(stage: Stage) -> Drill:
    """A candidate that was trained on turned labels in one slice, beside one that was not; and slice_quality's positive control."""
    began, folder = time.monotonic(), folder_of(stage, "slices")
    runs = {name: stage.play(name, world_size=1, steps=WORTH_STEPS, drill=drill) for name, drill in _CONTENDERS.items()}
    facts: RecipeFacts = ranks.call("trainer.describe:describe", RECIPE, str(folder), deadline_s=CALL_S)
    out, weights = folder / "outcomes.parquet", {name: str(ran.folder / "model.safetensors") for name, ran in runs.items()}
    quality = ranks.call("trainer.drill_scoring:score_weights", RECIPE, weights, str(out), deadline_s=CALL_S)
    outcomes = pd.read_parquet(out)
    planted = f"{facts.slices[0]}={outcomes[facts.slices[0]].value_counts().sort_index().idxmax()}"
    verdict = judge_slices(
        SliceRecords(
            outcomes=outcomes, slices=facts.slices, contenders=tuple(quality), utility_unit=facts.card.utility_unit,
            quality_name=facts.card.quality_name, quality=quality, target_quality=facts.target_quality, planted_slice=planted,
            planted_outcomes=plant(outcomes, planted), latency_ms=(1.0,) * 40, latency_machine="not measured",
        ),
        parse_policy().slice_quality,
    )  # fmt: skip
    drill = of_control("slice_regression", verdict, time.monotonic() - began)
    refused = [item.name for item in verdict.checks if item.passed is False and item.where]
    seen = verdict.outcome is Outcome.FAIL and bool(refused)
    detail = f"trained on turned labels: {verdict.outcome}, {', '.join(refused[:2])}; {drill.detail}"
    return Drill(
        name=drill.name, fired=drill.fired, detected=drill.detected and seen, mitigated=drill.mitigated and is_refused(verdict.gate),
        detail=detail, seconds=drill.seconds,
    )  # fmt: skip


_CONTENDERS = {"candidate": "slice-regression", "last_known_good": ""}


def bad_release_served(stage: Stage) -> Drill:
    """A bad version serves; the fallbacks are asked, and the pointer goes back to the one that answers. A torn fallback is not taken."""
    began, folder = time.monotonic(), folder_of(stage, "versions")
    good = stage.play("good", world_size=1, steps=4).folder / "model.safetensors"
    torn = folder / "torn.safetensors"
    torn.write_bytes(good.read_bytes()[:-8])
    store = FolderStore(folder / "store")
    etag = move_pointer(store, _pointer("2", sequence=1), None)
    torn_last, sound_last = (fallbacks(path) for path in (torn, good))
    to_baseline, to_last = decision_on(torn_last), decision_on(sound_last)
    move_pointer(store, _pointer(to_last.serving_version, sequence=2), etag)
    serving, _ = read_pointer(store, MODEL)
    seen = not torn_last[0].loaded and sound_last[0].predicted
    kept = (to_baseline.serving_kind, to_last.serving_kind) == ("baseline", "last_known_good")
    return Drill(
        name="bad_release_served", fired=True, detected=seen, seconds=time.monotonic() - began,
        mitigated=kept and serving is not None and serving.serving_version == "1" and decision_on(()).decision == "held",
        detail=f"torn last known-good {'refused' if seen else 'taken'}; with it {to_baseline.serving_kind} serves, with a sound "
        f"one {to_last.serving_kind}, and the pointer names version {serving.serving_version if serving else 'none'}",
    )  # fmt: skip


def fallbacks(weights: Path) -> tuple[FallbackCheck, ...]:
    """Ask a last known-good version, and the baseline, for a prediction."""
    return _asked("last_known_good", "1", weights), _asked("baseline", "0", Path("baseline"))


def _asked(kind: str, version: str, weights: Path) -> FallbackCheck:
    try:
        predicted = bool(ranks.call("trainer.drill_scoring:answers", RECIPE, str(weights), deadline_s=CALL_S))
    except RankError as error:
        return FallbackCheck(kind=kind, version=version, loaded=False, predicted=False, detail=str(error).partition("\n")[0])
    return FallbackCheck(kind=kind, version=version, loaded=True, predicted=predicted, detail="asked for two rows")


def decision_on(checks: tuple[FallbackCheck, ...]) -> ReleaseDecision:
    """What becomes of a candidate that slice_quality refuses."""
    return decide(verdicts=[_failed("slice_quality")], required=["slice_quality"], fallbacks=checks)


def _pointer(version: str, *, sequence: int) -> Pointer:
    kind: ServingKind = "candidate" if version == "2" else "last_known_good"
    return Pointer(
        model=MODEL, serving_version=version, serving_kind=kind, last_known_good="1", baseline="0", release_id="drill", sequence=sequence
    )  # fmt: skip


def of_control(name: str, verdict: GateVerdict, seconds: float) -> Drill:
    """A gate's positive control as a drill: the planted defect, whether the gate saw it, and whether such a candidate is refused."""
    control = verdict.control
    if control is None:
        return Drill(
            name=name, fired=False, detected=False, mitigated=False, detail=f"no control was run: {verdict.reason}", seconds=seconds
        )
    return Drill(
        name=name, fired=True, detected=control.caught, mitigated=control.caught and is_refused(verdict.gate),
        detail=f"{control.planted}: {control.detail}", seconds=seconds,
    )  # fmt: skip


def is_refused(gate: str) -> bool:
    """Whether a candidate that fails this gate is kept from serving: the decision's own word for it."""
    return decide(verdicts=[_failed(gate)], required=[gate], fallbacks=()).decision != "promoted"


def _failed(gate: str) -> GateVerdict:
    return GateVerdict(gate=gate, outcome=Outcome.FAIL, reason="planted", action="none")


def folder_of(stage: Stage, label: str) -> Path:
    """A fresh folder of the stage that is no run's."""
    folder = Path(stage.make_job(label, world_size=1).folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


RELEASE_DRILLS: Mapping[str, Callable[[Stage], Drill]] = {
    "torn_checkpoint": torn_checkpoint, "store_away": store_away, "wrong_gradient": wrong_gradient, "bad_data": bad_data,
    "slice_regression": slice_regression, "bad_release_served": bad_release_served,
}  # fmt: skip
