"""Thresholds are data: one versioned file, each threshold with its source beside it, ranges checked once here.

A policy file may name any subset of the default policy's keys; the rest keeps its default. A threshold is written as
`{value: 0.5, source: "why"}` or as a bare number. Unknown keys and impossible values raise ConfigError naming the key.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from validation.errors import ConfigError

GATES = ("data_contract", "gradient_equivalence", "kill_and_resume", "scaling", "slice_quality", "readiness")
DEFAULT_POLICY = Path(__file__).with_name("policy.yaml")

Number = TypeVar("Number", int, float)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Threshold(_Section, Generic[Number]):
    """A number and where it comes from."""

    value: Number
    source: str = "set in the policy file, no source given"


def _from_bare(value: Any) -> Any:
    return value if isinstance(value, Mapping) else {"value": value}


Share = Annotated[float, Field(ge=0, le=1)]
Level = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
ShareThreshold = Annotated[Threshold[Share], BeforeValidator(_from_bare)]
LevelThreshold = Annotated[Threshold[Level], BeforeValidator(_from_bare)]
PositiveThreshold = Annotated[Threshold[Positive], BeforeValidator(_from_bare)]
CountThreshold = Annotated[Threshold[Count], BeforeValidator(_from_bare)]


class EquivalencePolicy(_Section):
    """gradient_equivalence: how many steps and repeats, and how far from the reference in units of the tensor's own float noise."""

    steps: CountThreshold  # optimizer updates of every leg
    noise_multiple: PositiveThreshold  # limit of rel_err / noise
    slope_max: PositiveThreshold  # relative error between autograd's slopes and finite differences
    norm_excess: PositiveThreshold  # how far the handed gradient's norm may be beyond the limit, as a share of it
    soak_repeats: CountThreshold  # how many times each soak computes one gradient
    evaluation_max: PositiveThreshold  # relative difference between an own evaluation's quality and a plain one's


class RecoveryPolicy(_Section):
    """kill_and_resume: kills and the recovery budget."""

    kills: CountThreshold  # SIGKILLs in one run, each in another phase
    budget_s: PositiveThreshold  # death -> next optimizer update
    steps: CountThreshold  # length of the killed run and its twin, in updates


class ScalingPolicy(_Section):
    """scaling: efficiency floor, precision of the measurement, price."""

    efficiency_floor: ShareThreshold  # throughput(W) / (W * throughput(1)), ranks <= devices
    oversubscribed_floor: ShareThreshold  # throughput(W) / (devices * throughput(1)), ranks > devices
    repeats: CountThreshold
    repeats_max: CountThreshold  # measuring goes on until every efficiency is decided or this is reached
    steps: CountThreshold  # timed updates a repeat
    warmup_steps: CountThreshold
    confidence: ShareThreshold
    idle_share_max: ShareThreshold  # largest share of a step that one rank's idle time may take, ranks <= devices
    price_per_device_hour: PositiveThreshold  # USD


class SlicePolicy(_Section):
    """slice_quality: precision, margins and latency."""

    min_n: CountThreshold  # samples a slice needs to be judged
    min_coverage: ShareThreshold  # share of samples in judged slices, per slice column
    confidence: ShareThreshold  # family-wise over all comparisons
    margin: PositiveThreshold  # non-inferiority, in standard deviations of the reference's utility
    calibration_max: ShareThreshold  # |mean confidence - hit rate| in a slice
    latency_p95_ms: PositiveThreshold


class ReadinessPolicy(_Section):
    """readiness: the rubric's floor, and how many modes have to have been drilled."""

    score_floor: ShareThreshold
    drilled_floor: ShareThreshold


class DecisionPolicy(_Section):
    """What a person has to say, and may say."""

    approval: bool  # a promotion waits for a named person's yes
    approval_days: PositiveThreshold  # how long a yes may be awaited and how long it counts
    waivable: tuple[str, ...]  # gates whose fail or inconclusive a person may waive
    waiver_days: PositiveThreshold  # the longest a waiver may count


class ReconcilePolicy(_Section):
    """What becomes of registry aliases that were moved by hand."""

    moved_alias: Literal["put_back", "adopt"]  # adopt: only a version whose evidence verifies


class MonitoringPolicy(_Section):
    """monitor: when a serving version is unhealthy, and when it is rolled back."""

    alpha: LevelThreshold  # probability of ever rolling back a version that is as good as its fallback
    margin: PositiveThreshold  # how much worse than the fallback is tolerated, in standard deviations of its utility; caps a day's gain
    min_n: CountThreshold  # outcomes whose mean is one value of the test: a day, or as many days as it takes
    maturity_days: CountThreshold  # an outcome is final so many days after its prediction
    coverage_min: ShareThreshold  # share of mature predictions whose outcome came in time; a day below it is not judged
    failures_max: ShareThreshold  # share of requests that were not answered
    latency_p95_ms: PositiveThreshold
    missing_max: ShareThreshold  # share of a day's missing values in a column, beyond the worst day of training
    still_max: ShareThreshold  # share of a day's values in one bin of a column, beyond the worst day of training
    drift_max: PositiveThreshold  # population stability index of a week, at least training's own worst; warns only


class CostPolicy(_Section):
    """cost: prices in USD and assumptions that turn a release's measurements into money; a device-hour's price stands in `scaling`."""

    storage_gib_month: PositiveThreshold  # USD
    retention_days: CountThreshold  # how long a release's evidence and model files are kept
    human_hour: PositiveThreshold  # USD
    review_hours_max: PositiveThreshold  # of a wait for a person, what is counted as work at most
    models: CountThreshold  # models that share the devices; releases of one model wait for each other


class Policy(_Section):
    """All thresholds of a release."""

    version: int = Field(ge=1)
    required: tuple[str, ...]  # gates that have to pass
    world_sizes: tuple[Count, ...] = Field(min_length=1)
    gradient_equivalence: EquivalencePolicy
    kill_and_resume: RecoveryPolicy
    scaling: ScalingPolicy
    slice_quality: SlicePolicy
    readiness: ReadinessPolicy
    decision: DecisionPolicy
    reconcile: ReconcilePolicy
    monitoring: MonitoringPolicy
    costs: CostPolicy


def parse_policy(text: str | None = None, *, name: str = "policy") -> Policy:
    """Lay a policy text over the defaults. Raises ConfigError with every bad key; `name` is how messages call the text."""
    base: dict[str, Any] = yaml.safe_load(DEFAULT_POLICY.read_text())
    if text is not None:
        base = _overlaid(base, _mapping(text, name), name)
    try:
        policy = Policy.model_validate(base)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(
            f"{name} cannot be used: {problems}. No release was started. Correct these keys; the defaults with their sources "
            "stand in validation/policy.yaml."
        ) from None
    unknown = sorted(set(policy.required) - set(GATES))
    if unknown or not policy.required:
        raise ConfigError(f"{name} requires {unknown or 'no gate'}; choose from: {', '.join(GATES)}.")
    if critical := sorted(set(policy.decision.waivable) - set(GATES)):
        raise ConfigError(f"{name} lets {critical} be waived, which are no gates; choose from: {', '.join(GATES)}.")
    return policy


def _mapping(text: str, name: str) -> dict[str, Any]:
    try:
        given = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not YAML: {error}. No release was started. Mend the file and start again.") from None
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise ConfigError(f"{name} holds a {type(given).__name__}, not keys and values. Write it like validation/policy.yaml.")
    return given


def _overlaid(base: dict[str, Any], over: Mapping[str, Any], name: str, path: str = "") -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        at = f"{path}{key}"
        if key not in base:
            known = ", ".join(base)
            raise ConfigError(f"{name} has the unknown key '{at}'. It would be ignored, so nothing was started. Use one of: {known}.")
        inner = base[key]
        section = isinstance(inner, dict) and "value" not in inner
        if section and not isinstance(value, Mapping):
            raise ConfigError(f"{name}: '{at}' is a section, got {value!r}. Give it keys from: {', '.join(inner)}.")
        merged[key] = _overlaid(inner, value, name, f"{at}.") if section else value
    return merged
