"""The real hands of a release: probes with ranks, training, registration, loading what could serve instead."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pandas as pd

from flows import drills
from flows.candidate import check_fallbacks, register, train
from flows.equivalence_probe import probe_equivalence
from flows.probes import Bench, probe_scaling
from flows.recovery_probe import probe_recovery
from flows.slice_probe import contender_records
from flows.under_way import Hands, Release
from infra.device_lock import devices_held
from infra.settings import load_settings
from validation.contract import judge_contract
from validation.equivalence import judge_equivalence
from validation.errors import ConfigError
from validation.expectations import build_contract_records
from validation.policy import GATES
from validation.readiness import judge_readiness
from validation.recovery import judge_recovery
from validation.scaling import judge_scaling
from validation.slices import judge_slices
from validation.verdict import GateVerdict


def probe_and_judge(release: Release, gate: str, bench: Bench) -> tuple[Any, GateVerdict]:
    """Make a gate's records, and its verdict on them."""
    policy = bench.plan.policy
    match gate:
        case "data_contract":
            frames = {split: pd.read_parquet(path) for split, path in bench.plan.frames.items()}
            contract = build_contract_records(frames, bench.plan.facts.contract)
            return contract, judge_contract(contract)
        case "gradient_equivalence":
            runs = probe_equivalence(bench)
            return runs, judge_equivalence(runs, policy.gradient_equivalence)
        case "kill_and_resume":
            kills = probe_recovery(bench)
            return kills, judge_recovery(kills, policy.kill_and_resume)
        case "scaling":
            points = probe_scaling(bench, release.judged_candidate().folder)
            return points, judge_scaling(points, policy.scaling)
        case "slice_quality":
            outcomes = contender_records(bench.plan, release.judged_candidate(), bench.folder)
            return outcomes, judge_slices(outcomes, policy.slice_quality)
        case "readiness":
            drilled = drills.probe_readiness(bench, release.lines, release.fallbacks)
            return drilled, judge_readiness(drilled, policy.readiness)
    raise ConfigError(f"there is no gate '{gate}', so nothing was run. Choose one of: {', '.join(GATES)}.")


def devices(of: str, say: Callable[[str], None]) -> AbstractContextManager[float]:
    """The machine's devices, held until the block ends."""
    return devices_held(load_settings(), of, say)


REAL = Hands(probe=probe_and_judge, train=train, register=register, devices=devices, check_fallbacks=check_fallbacks)
