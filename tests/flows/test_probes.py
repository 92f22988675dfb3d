"""Probes: reductions that need no run."""

from typing import Any, cast

import pandas as pd
import pytest

from flows.equivalence_probe import Probe
from flows.probes import Bench, scaling_point, straggler_delay_ms
from trainer.config import Conditions
from trainer.runlog import machine
from validation.errors import EvidenceError, RankError
from validation.records import TIMELINE_COLUMNS, RunRecord, ScalingPoint

CONDITIONS = Conditions(samples=9, judged=5, global_batch_size=5, accumulation=1, epochs=1, clip_norm=None, ragged_weights=False)


def run_record(world_size: int) -> RunRecord:
    return RunRecord(
        recipe="tiny", world_size=world_size, parallel="ddp", reduction="exact", precision="float32", steps=4, seed=0, state_sha256="a",
        state_sha256_by_rank=("a",) * world_size, ledger_sha256="b", throughput_sps=100.0, seconds=1.0, worker_seconds=2.0, attempts=1,
        faults_fired=(), recoveries=(), peak_memory_mib=10.0, machine=machine(),
    )  # fmt: skip


def timeline(step_ms: dict[int, list[float]], wait_ms: dict[int, float]) -> pd.DataFrame:
    """One row a rank and step; every phase but wait is zero."""
    rows = [
        dict.fromkeys(TIMELINE_COLUMNS, 0.0) | {"rank": rank, "step": step, "step_ms": value, "wait_ms": wait_ms[rank]}
        for rank, values in step_ms.items()
        for step, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


def scaling_point_of(step_ms: float, world_size: int) -> ScalingPoint:
    return ScalingPoint(
        world_size=world_size, repeat=0, reduction="exact", throughput_sps=1.0, step_ms_p50=step_ms, rank_step_ms=(step_ms,) * world_size,
        phase_ms={}, peak_memory_mib=1.0,
    )  # fmt: skip


def test_a_point_leaves_out_warm_up_and_waiting() -> None:
    """A step is as long as its slowest rank's; a rank's own time is its step less its wait; warm-up steps do not count."""
    table = timeline({0: [900.0, 120.0, 120.0], 1: [900.0, 125.0, 125.0]}, {0: 20.0, 1: 0.0})

    point = scaling_point(run_record(2), table, repeat=3, warmup_steps=1)

    assert (point.step_ms_p50, point.rank_step_ms, point.repeat) == (125.0, (100.0, 125.0), 3)
    assert point.phase_ms["wait_ms"] == 10.0


@pytest.mark.parametrize("limit", [0.1, 0.5, 0.9])
def test_the_planted_straggler_idles_its_peer_clearly_beyond_the_limit(limit: float) -> None:
    """The delay's share of the delayed step exceeds any limit that a policy can set, also beside the slowest world size's step."""
    delay_ms = straggler_delay_ms([scaling_point_of(10.0, 1), scaling_point_of(30.0, 2)], limit)

    assert delay_ms / (30.0 + delay_ms) > limit


class Hanging:
    """A bench whose runs on two ranks never end in time."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.said: list[str] = []

    def run(self, label: str, *, world_size: int, **_: Any) -> Any:
        self.begun.append(label)
        raise RankError(f"no word from rank 1 of {world_size}")

    def say(self, text: str) -> None:
        self.said.append(text)


def test_after_a_hang_nothing_more_is_run_on_as_many_ranks() -> None:
    """Each leg would wait out its deadline; the leg that stopped keeps the reason, and the control is left out, too."""
    bench = Hanging()
    probe = Probe(cast(Bench, bench), CONDITIONS, steps=6, repeats=2, brought=("reduce",), poisoned_step=3)

    for name in ("own", "logic", "spike"):
        probe.run(name, 2)
    planted = probe.plant()

    assert bench.begun == ["own-w2"]
    assert [(leg.name, leg.stopped) for leg in probe.legs] == [("own", "no word from rank 1 of 2")]
    assert bench.said[-1] == "nothing more is run on 2 ranks"
    assert planted.startswith("the gradient divided")
    assert probe.compared == []


def test_a_trainer_that_leaves_no_gradients_is_still_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference has nothing to compare; what else was measured says that no weight moves."""

    def nothing(*_: Any, **__: Any) -> None:
        raise EvidenceError("03-logic-w1 lacks 6 of its tensors")

    monkeypatch.setattr("flows.equivalence_probe.ranks.call", nothing)
    bench = Hanging()
    probe = Probe(cast(Bench, bench), CONDITIONS, steps=6, repeats=2, brought=("step",), poisoned_step=3)

    assert probe.errors(("tiny_recipe:recipe", CONDITIONS)).empty
    assert bench.said == ["nothing can be compared with the reference: 03-logic-w1 lacks 6 of its tensors"]
