"""The probe of gradient_equivalence: short audited runs under hard conditions at every world size, and the reference beside them."""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from flows.probes import CALL_DEADLINE_S, Bench
from trainer import ranks, runlog
from trainer.config import Conditions, Poison
from validation.equivalence_legs import EVALUATION, LEGS, is_own, required_legs
from validation.errors import EvidenceError, InputError, ReleaseError
from validation.records import GRADIENT_ERROR_COLUMNS, Condition, EquivalenceRecords, EvaluationCount, Leg, RunRecord

STALL_S = 30.0  # a rank that waits longer in a collective of these few small steps waits for ever
DEADLINE_S = 240.0  # of one leg
PLANTED_WORLD_SIZE = 2
PLAIN = ("real", "own")  # legs that say what a plain run of as many steps takes
WHOLE = ("exact", "own")  # legs whose end before its time is every other leg's of as many ranks, too
PRECISIONS = {"logic": "float64", "unclipped": "float64"}  # of legs that are not run as trained
REDUCTIONS = {"fast": "fast"}


@dataclass(slots=True)
class Probe:
    """The legs of one recipe, as they are run."""

    bench: Bench
    conditions: Conditions
    steps: int
    repeats: int  # of a soak
    brought: tuple[str, ...]
    poisoned_step: int
    legs: list[Leg] = field(default_factory=list)
    compared: list[dict[str, Any]] = field(default_factory=list)  # runs that the reference is asked about
    counts: list[EvaluationCount] = field(default_factory=list)
    plain_seconds: float = float("nan")
    given_up: set[int] = field(default_factory=set)  # world sizes at which nothing more is run: a hang costs a deadline each time

    def run(self, name: str, world_size: int, *, evaluate: bool = True) -> None:
        """Run one leg; one that ends before its time is kept with the reason. Raises InputError: nothing of this recipe can be judged."""
        if world_size in self.given_up:
            return
        options = self._options(name, world_size, evaluate=evaluate)
        try:
            record, folder = self.bench.run(f"{name}-w{world_size}", world_size=world_size, **options)
        except InputError:
            raise
        except ReleaseError as error:
            if options.get("evaluate") and "hooks.evaluate" in str(error):  # the training is judged all the same, without it
                self.bench.say(f"{name}-w{world_size}: hooks.evaluate raised: {str(error)[:200]}")
                self.legs.append(self._stopped(EVALUATION, world_size, str(error)))
                self.run(name, world_size, evaluate=False)
                return
            self._give_up(name, world_size, error)
            self.legs.append(self._stopped(name, world_size, str(error)))
            return
        self.legs.append(_leg(name, record, folder))
        if name in PLAIN and world_size == 1:
            self.plain_seconds = record.seconds
        if LEGS[name].compared or name == "spike":
            self.compare(name, record, folder, options)
        if options.get("evaluate"):
            self.counts.append(EvaluationCount(world_size=world_size, **runlog.load_evaluation(folder)))

    def compare(self, name: str, record: RunRecord, folder: Path, options: Mapping[str, Any]) -> None:
        """Remember a run for the reference."""
        self.compared.append({
            "leg": name, "world_size": record.world_size, "folder": str(folder), "precision": record.precision,
            "clip": name != "unclipped", "poison": options.get("poison"),
        })  # fmt: skip

    def plant(self) -> str:
        """Run the positive control: a known wrong line; one that ends before its time leaves nothing. Returns: what was planted."""
        options = {"dropout": False, "defect": "divide_twice"} | self._common()
        planted = f"the gradient divided by the world size twice ({PLANTED_WORLD_SIZE} ranks)"
        if PLANTED_WORLD_SIZE in self.given_up:
            return planted
        try:
            record, folder = self.bench.run("planted", world_size=PLANTED_WORLD_SIZE, **options)
        except InputError:
            raise
        except ReleaseError as error:
            self._give_up("planted", PLANTED_WORLD_SIZE, error)
            return planted
        self.compare("planted", record, folder, options)
        return planted

    def errors(self, asked: tuple[str, Conditions]) -> pd.DataFrame:
        """Every remembered run's distance to the reference; none when a trainer left no gradients, which other checks account for."""
        try:
            found: pd.DataFrame = ranks.call(
                "trainer.reference:gradient_errors", *asked, self.compared, self.steps, deadline_s=CALL_DEADLINE_S
            )  # fmt: skip
        except EvidenceError as error:
            self.bench.say(f"nothing can be compared with the reference: {error}")
            return pd.DataFrame(columns=list(GRADIENT_ERROR_COLUMNS))
        return found

    def _give_up(self, name: str, world_size: int, error: ReleaseError) -> None:
        said = textwrap.shorten(str(error), 200, placeholder=" ...")
        self.bench.say(f"{name}-w{world_size}: stopped{', for its loss was made infinite' if name == 'overflow' else ''}: {said}")
        if name in WHOLE:
            self.bench.say(f"nothing more is run on {world_size} ranks")
            self.given_up.add(world_size)

    def _common(self) -> dict[str, Any]:
        return {
            "steps": self.steps, "keep_gradients": self.steps, "audit": True, "conditions": self.conditions, "stall_s": STALL_S,
            "deadline_s": DEADLINE_S,
        }  # fmt: skip

    def _options(self, name: str, world_size: int, *, evaluate: bool) -> dict[str, Any]:
        options = self._common() | {
            "precision": PRECISIONS.get(name, "float32"), "reduction": REDUCTIONS.get(name, "exact"), "dropout": LEGS[name].dropout,
        }  # fmt: skip
        if not LEGS[name].hardened:
            options["conditions"] = None
        if name == "unclipped":
            options["conditions"] = replace(self.conditions, clip_norm=None)
        if name in ("spike", "overflow"):
            options["poison"] = Poison(kind=name, rank=world_size - 1, step=self.poisoned_step)  # type: ignore[arg-type]
        if name == "soak":
            options["soak"] = self.repeats
        if evaluate and name in ("exact", "own") and "evaluate" in self.brought:
            options["evaluate"] = True
        return options

    def _stopped(self, name: str, world_size: int, why: str) -> Leg:
        reduction = "own" if is_own(self.brought) else REDUCTIONS.get(name, "exact")
        return Leg(
            name=name, world_size=world_size, parallel="ddp", reduction=reduction, precision=PRECISIONS.get(name, "float32"), stopped=why,
        )  # fmt: skip


def probe_equivalence(bench: Bench) -> EquivalenceRecords:
    """Choose hard conditions, run every leg that this trainer needs, ask the reference."""
    plan, policy = bench.plan, bench.plan.policy.gradient_equivalence
    recipe, steps = plan.request.recipe, policy.steps.value
    chosen = ranks.call("trainer.hardening:choose", recipe, plan.world_sizes, steps, deadline_s=CALL_DEADLINE_S)
    bench.say(f"hard conditions: {_named(chosen.held)}")
    bench.say("what one process would do; finite differences")
    asked = (recipe, chosen.conditions)
    expected = ranks.call("trainer.reference:expectations", *asked, steps, deadline_s=CALL_DEADLINE_S)
    probe = Probe(bench, chosen.conditions, steps, policy.soak_repeats.value, plan.facts.brought, poisoned_step(expected.expected, steps))
    for name, world_size in required_legs(plan.facts.brought, plan.world_sizes, chosen.held):
        probe.run(name, world_size)
    planted = probe.plant()
    bench.say("float64 reference, and float noise of every tensor")
    errors = probe.errors(asked)
    is_planted = errors["leg"] == "planted"
    return EquivalenceRecords(
        world_sizes=plan.world_sizes, brought=plan.facts.brought, conditions=chosen.held, steps=steps, legs=tuple(probe.legs),
        expected=expected.expected, expected_order=expected.order, expected_rates=expected.rates, frozen=expected.frozen,
        errors=errors[~is_planted].reset_index(drop=True), slopes=expected.slopes, slopes_excluded=expected.slopes_excluded,
        judged_ids=expected.judged_ids, draws_by_key=expected.draws_by_key, evaluations=tuple(probe.counts), planted_defect=planted,
        planted_errors=errors[is_planted].assign(leg="training").reset_index(drop=True), worker_seconds=bench.worker_seconds,
        plain_seconds=probe.plain_seconds,
    )  # fmt: skip


def poisoned_step(expected: pd.DataFrame, steps: int) -> int:
    """The step whose bad micro-batch is told from the others by its sample ids: near the middle, with no sample in it twice.

    A step across an epoch's end may hold a sample twice. Args: expected, EXPECTED_COLUMNS.
    """
    twice = set(expected.loc[expected.duplicated(["step", "sample_id"]), "step"])
    order = sorted(range(steps), key=lambda step: (abs(step - steps // 2), step))
    return next((step for step in order if step not in twice), steps // 2)


def _named(held: tuple[Condition, ...]) -> str:
    on, off = ([condition.name for condition in held if condition.held is wanted] for wanted in (True, False))
    return f"{', '.join(on)}{'; not held: ' + ', '.join(off) if off else ''}"


def _leg(name: str, record: RunRecord, folder: Path) -> Leg:
    return Leg(
        name=name, world_size=record.world_size, parallel=record.parallel, reduction=record.reduction, precision=record.precision,
        states=record.state_sha256_by_rank, ledger=runlog.load_ledger(folder), digests=runlog.load_digests(folder),
        consumed=runlog.load_consumed(folder), streams=runlog.load_streams(folder), updates=runlog.load_updates(folder),
        collectives=runlog.load_collectives(folder),
    )  # fmt: skip
