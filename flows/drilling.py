"""`seatrial drill`: every failure mode is caused for real, on a small recipe in a temporary folder; was it seen, and was the promise kept?

What a drill showed is kept (flows/drill_records.py), and the readiness gate counts it until the code changes.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.drill_records import FOLDER, keep
from flows.drill_release import RECIPE, RELEASE_DRILLS
from flows.drill_scenes import SCENES, drill_group
from flows.drill_slow import SLOW_DRILLS
from flows.drill_stage import Stage
from trainer.config import TrainJob
from validation.errors import ConfigError
from validation.failure_modes import default_modes
from validation.records import Drill

MARKS = ("fired", "detected", "mitigated")
Play = Callable[[Stage], Drill]
Say = Callable[[str], None]


def drills() -> Mapping[str, Play]:
    """Every drill by name, in the registry's order."""
    scenes: dict[str, Play] = {name: _scene(name) for name in SCENES}
    known = {**scenes, **SLOW_DRILLS, **RELEASE_DRILLS}
    return {mode.drill: known[mode.drill] for mode in default_modes()}


def _scene(name: str) -> Play:
    return lambda stage: drill_group(name, stage)


def run_drills(names: Sequence[str], home: Path, *, say: Say) -> dict[str, Any]:
    """Run drills one after the other and keep what they showed; returns the document of `seatrial drill --json`.

    Args: names, () for all. Raises: ConfigError for a name that nobody listed, before anything is run.
    """
    known = drills()
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no drill '{', '.join(unknown)}', so nothing was run. Choose out of: {', '.join(known)}.")
    done = []
    say(f"{'drill':<21}  {'  '.join(f'{name:<9}' for name in MARKS)}  {'took':>7}")
    with tempfile.TemporaryDirectory(prefix="seatrial-drill-") as scratch:
        stage = Stage(job_maker(Path(scratch)))
        for name in names or known:
            drill = play(name, known[name], stage)
            keep(home, drill)
            done.append(drill)
            say(line_of(drill))
        broken = [drill.name for drill in done if not is_good(drill)]
        folder = _rescued(Path(scratch), home) if broken else ""
    return {"drills": [{**asdict(drill), "passed": is_good(drill)} for drill in done], "broken": broken, "folder": folder}


def play(name: str, drill: Play, stage: Stage) -> Drill:
    """Run one drill; one that breaks has shown nothing."""
    began = time.monotonic()
    try:
        played = drill(stage)
    except Exception as error:  # whatever it is, the other drills are still to be run
        why = f"the drill itself broke: {type(error).__name__}: {error}".partition("\n")[0]
        played = Drill(name=name, fired=False, detected=False, mitigated=False, detail=why)
    return replace(played, seconds=time.monotonic() - began, made_at=datetime.now(UTC).isoformat(timespec="seconds"))


def is_good(drill: Drill) -> bool:
    """Whether it fired, was seen, and what was promised happened."""
    return drill.fired and drill.detected and drill.mitigated


def line_of(drill: Drill) -> str:
    """One drill in one line, for people."""
    marks = "  ".join(f"{'yes' if getattr(drill, name) else 'NO':<9}" for name in MARKS)
    return f"{drill.name:<21}  {marks}  {drill.seconds:5.1f} s" + ("" if is_good(drill) else f"\n    {drill.detail}")


def listed() -> list[dict[str, Any]]:
    """Every drill: what it fires, and what is promised."""
    return [
        {
            "drill": mode.drill,
            "critical": mode.critical,
            "in_release": mode.in_release,
            "fired_by": mode.fired_by,
            "mitigation": mode.mitigation,
        }
        for mode in default_modes()
    ]


def job_maker(root: Path) -> Callable[..., TrainJob]:
    """Jobs of the drill recipe, each in a fresh folder below `root`."""
    count = 0

    def make(label: str, **options: Any) -> TrainJob:
        nonlocal count
        count += 1
        folder = root / f"{count:02d}-{label}"
        folder.mkdir(parents=True)
        return TrainJob(**{"recipe": RECIPE, "folder": str(folder), **options})

    return make


def _rescued(scratch: Path, home: Path) -> str:
    """Where the runs of a drill that went wrong stand now."""
    kept = home / FOLDER / f"broken-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    shutil.copytree(scratch, kept, dirs_exist_ok=True)
    return str(kept)
