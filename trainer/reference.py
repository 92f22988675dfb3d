"""The other way to the same numbers: what one process would consume and compute, and how far runs are from it.

A plain float64 training (trainer/plain.py) of the hardened recipe, beside each tensor's own float noise (trainer/reference_noise.py), the
samples and rates that one process alone would use, and slopes by finite differences (trainer/slopes.py) for what all of these share.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file
from torch import Tensor

from trainer import runlog
from trainer.audit import content_digests
from trainer.conditions import Expectations as Expectations
from trainer.config import Conditions
from trainer.expecting import contents_of, draws_by_key
from trainer.hardening import hardened
from trainer.hooks import PATH
from trainer.plain import SLACK, Gradients, Moment, Setting, train, whole_norm
from trainer.problem import Problem, load_problem
from trainer.recipe import load_recipe
from trainer.reference_noise import Noise, distances, float32_noise, float64_noise, gradients_at, without_gradient
from trainer.slopes import no_slopes, slopes
from trainer.state import tensor_sha256
from validation.errors import EvidenceError
from validation.records import EXPECTED_COLUMNS, GRADIENT_ERROR_COLUMNS

BUFFER_NOISE = 1e-10  # relative: float64 sums of some hundred samples agree to 1e-13, statistics of other samples do not to 1e-3
LARGEST_SLACK = 1e-5  # of the norm: an own clipping may scale by limit / (norm + slack) with another small slack than torch's
# of a step in gradients.safetensors; the reduced gradient has no part's name
PARTS = ("weights", "clipped", "after", "buffers", "averages")

Row = tuple[str, int, int, str, str, float, float, float]


def gradient_errors(recipe_path: str, conditions: Conditions | None, runs: Sequence[Mapping[str, Any]], steps: int) -> pd.DataFrame:
    """Distance of every run's kept gradients and updates to the float64 reference, beside the tensors' noise.

    Args: runs, each {leg, world_size, folder, precision} and perhaps {clip, poison}: clip False = conditions.clip_norm was off; poison, the
        job's Poison or None. Their folders hold gradients.safetensors of at least `steps` steps.
    Returns: GRADIENT_ERROR_COLUMNS for what a run left of the stages "reduced", "clipped" and, in float64, "weight" (the update); of an own
        trainer in float64 also "buffer" and "average", after the first update, beside the leg's run on the fewest ranks. A
        float64 run is compared with the reference's own training, weights' evolution included. A float32 run's weights part from the
        reference's by rounding after one update, so the reference is asked at the run's own weights: that compares the computation of
        gradients and nothing else. A tensor without a gradient counts as zero, one that the reference does not have is wrong by its
        whole size. From a poisoned step on that no rank made (its update is zero), or whose loss was infinite, there are no rows; of a
        float32 run that skipped a spike there are those of every step that was made.
    Raises: EvidenceError when a run kept fewer steps.
    """
    torch.set_num_threads(1)  # same bits, and sooner: these are many small operations
    bench = _Bench(load_problem(hardened(load_recipe(recipe_path), conditions, dropout=False), steps))
    return pd.DataFrame([row for run in runs for row in bench.rows(_Run.of(run))], columns=list(GRADIENT_ERROR_COLUMNS))


def expectations(recipe_path: str, conditions: Conditions | None, steps: int) -> Expectations:
    """What one process would consume and do in the first `steps` updates."""
    torch.set_num_threads(1)
    recipe = load_recipe(recipe_path)
    problem = load_problem(hardened(recipe, conditions, dropout=False), steps)
    whole = hardened(recipe, conditions)
    contents = contents_of(whole, problem, steps)
    ids = [problem.ids(step).tolist() for step in range(len(problem.samples))]
    excludes = getattr(recipe, "excludes", {})
    table, why = (
        no_slopes(f"excluded by the recipe: {excludes['finite_differences']}") if "finite_differences" in excludes else slopes(problem)
    )
    model = problem.recipe.model()
    return Expectations(
        expected=pd.DataFrame(
            [(step, *pair) for step, both in enumerate(zip(ids, contents, strict=True)) for pair in zip(*both, strict=True)],
            columns=list(EXPECTED_COLUMNS),
        ),
        order=() if problem.has_own_order else tuple(sample for step in ids for sample in step),
        rates=tuple(moment.rates for moment in train(problem, Setting(limit=problem.recipe.training.clip_norm))),
        frozen=tuple(name for name, parameter in model.named_parameters() if not parameter.requires_grad),
        judged_ids=tuple(np.asarray(problem.recipe.data("judge").sample_ids).tolist()), draws_by_key=draws_by_key(whole, problem),
        slopes=table, slopes_excluded=why,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    leg: str
    world_size: int
    folder: Path
    precision: str
    clip: bool
    poison: Any  # with a kind and a step, or None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "_Run":
        return cls(
            leg=given["leg"], world_size=given["world_size"], folder=Path(given["folder"]), precision=given["precision"],
            clip=given.get("clip", True), poison=given.get("poison"),
        )  # fmt: skip


@dataclass
class _Bench:
    """Trainings and noise of the reference, made when first asked for and once each."""

    problem: Problem
    _moments: dict[Setting, list[Moment]] = field(default_factory=dict)
    _float64: dict[Setting, Noise] = field(default_factory=dict)
    _float32: dict[tuple[Setting, int], Noise] = field(default_factory=dict)
    _at: dict[tuple[Setting, int, str], dict[str, Gradients]] = field(
        default_factory=dict
    )  # runs of the exact reduction share their weights
    _buffers: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # of each leg's first run, after its first update
    _averages: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = field(default_factory=dict)  # and its weights by then

    def rows(self, run: _Run) -> Iterator[Row]:
        """One run's rows."""
        steps = len(self.problem.parts)
        poisoned, compared = (frozenset(), range(steps)) if run.poison is None else _poisoned(run, self.problem)
        kept = _kept(run.folder, self._training(Setting(limit=self.problem.recipe.training.clip_norm)), compared)
        setting = self._setting(run, kept, poisoned)
        for step, moment in ((step, self._training(setting)[step]) for step in compared):
            noise = self._noise(setting, run.precision, step)
            for stage, expected in self._expected(run, setting, kept, step, moment).items():
                found = _found(kept, step, stage, expected)
                for name, error, scale in _compared(found, expected, without_gradient(moment, stage)):
                    yield run.leg, run.world_size, step, stage, name, error, noise.get((stage, step, name), 0.0), scale
        if run.precision == "float64" and set(PATH) & set(self.problem.brought):
            yield from self._moved_buffers(run, _left(kept, 0, "buffers"))
            yield from self._moved_averages(run, _left(kept, 0, "averages"), _left(kept, 0, "after"))

    def _moved_buffers(self, run: _Run, found: dict[str, Tensor]) -> Iterator[Row]:
        """Buffers after the first update beside those of the leg's run on the fewest ranks, in whatever order they hold their values."""
        first = self._buffers.setdefault(run.leg, found)
        for name, value in sorted(found.items()):
            expected = first.get(name)
            error = math.inf if expected is None or expected.shape != value.shape else _apart(value.double(), expected.double())
            yield run.leg, run.world_size, 0, "buffer", name, error, BUFFER_NOISE, math.nan

    def _moved_averages(self, run: _Run, found: dict[str, Tensor], weights: dict[str, Tensor]) -> Iterator[Row]:
        """Averages that hooks keep, after the first update, beside those of the leg's run on the fewest ranks.

        Left out is what has an own reason to differ: an average whose weights differ by then (a gradient that is rounding alone lets Adam
        step anywhere), and one that only some world sizes keep.
        """
        first, others = self._averages.setdefault(run.leg, (found, weights))
        same = {name for name, value in weights.items() if name in others and _near(value, others[name])}
        for name, value in sorted(found.items()):
            of = {weight for weight in weights if name.endswith(f".{weight}")} or set(weights)
            if name not in first or first[name].shape != value.shape or not of <= same:
                continue
            noise = max(BUFFER_NOISE, torch.finfo(value.dtype).eps)  # averages may be kept in a narrower type
            yield run.leg, run.world_size, 0, "average", name, _apart(value.double(), first[name].double()), noise, math.nan

    def _setting(self, run: _Run, kept: Mapping[str, Tensor], poisoned: frozenset[tuple[int, int]]) -> Setting:
        limit = self.problem.recipe.training.clip_norm if run.clip else None
        plain = Setting(limit=limit, poisoned=poisoned)
        if limit is None or not {"clip", "step"} & set(self.problem.brought):
            return plain
        first = self._training(plain)[0]
        return Setting(
            limit=limit, poisoned=poisoned, slack=_slack(_found(kept, 0, "clipped", first.clipped), first.norm, limit, run.precision)
        )

    def _training(self, setting: Setting) -> list[Moment]:
        if setting not in self._moments:
            self._moments[setting] = list(train(self.problem, setting))
        return self._moments[setting]

    def _noise(self, setting: Setting, precision: str, step: int) -> Noise:
        """Noise of at least this step."""
        if precision == "float64":
            if setting not in self._float64:
                self._float64[setting] = float64_noise(self.problem, setting, self._training(setting))
            return self._float64[setting]
        key = setting.until(step), step
        if key not in self._float32:
            self._float32[key] = float32_noise(self.problem, setting, self._training(setting), step)
        return self._float32[key]

    def _expected(
        self, run: _Run, setting: Setting, kept: Mapping[str, Tensor], step: int, moment: Moment
    ) -> dict[str, Gradients]:  # fmt: skip
        """What should have been found, by stage that the run left something of."""
        right = {"reduced": moment.reduced, "clipped": moment.clipped, "weight": moment.update}
        if run.precision != "float64":
            weights = {name: kept[f"step{step}/weights/{name}"] for name in moment.weights}
            key = setting.until(step), step, "".join(tensor_sha256(value) for value in weights.values())
            if key not in self._at:
                self._at[key] = gradients_at(self.problem, setting, weights, step)
            right = self._at[key]
        return {stage: value for stage, value in right.items() if _left(kept, step, "after" if stage == "weight" else stage)}


def _poisoned(run: _Run, problem: Problem) -> tuple[frozenset[tuple[int, int]], Sequence[int]]:
    """(step, place in its samples) of the micro-batch that was poisoned, and the steps that are compared."""
    at = run.poison["step"] if isinstance(run.poison, Mapping) else run.poison.step
    kind = run.poison["kind"] if isinstance(run.poison, Mapping) else run.poison.kind
    consumed, updates = runlog.load_consumed(run.folder), runlog.load_updates(run.folder)
    is_skipped = bool((updates.loc[updates["step"] == at, "moved"] == 0).all())
    struck = consumed[consumed["poisoned"].astype(bool) & (consumed["step"] == at)]
    every = range(len(problem.parts))
    if kind == "spike" and is_skipped and run.precision != "float64":  # what was left of it would be in a later gradient
        moved = set(updates.loc[updates["moved"] > 0, "step"])
        return frozenset(), [step for step in every if step in moved]
    if kind != "spike" or is_skipped or at not in every or (struck["sample_id"] < 0).any():
        return frozenset(), every[:at]
    places = places_of(problem, at, list(zip(struck["sample_id"], struck["content"], strict=True)))
    return frozenset((at, place) for place in places), every


def places_of(problem: Problem, step: int, samples: Sequence[tuple[int, str]]) -> list[int]:
    """Where (sample id, content) stand in a step: of an id that stands there twice the one of that content. Strangers are left out."""
    contents = [content for part in problem.parts[step] for content in content_digests(part.batch)]
    free = list(enumerate(zip(problem.ids(step).tolist(), contents, strict=True)))
    found = []
    for sample, content in samples:
        alike = [entry for entry in free if entry[1][0] == sample]
        best = next((entry for entry in alike if entry[1][1] == content), alike[0] if alike else None)
        if best is not None:
            free.remove(best)
            found.append(best[0])
    return found


def _apart(found: Tensor, expected: Tensor) -> float:
    """Relative distance, the smaller one of values in their places and sorted: a queue may be filled in any order."""
    size = float(expected.norm()) or float(found.norm()) or 1.0
    in_order = ((found, expected), (found.flatten().sort()[0], expected.flatten().sort()[0]))
    return min(float((one - other).norm()) for one, other in in_order) / size


def _near(found: Tensor, expected: Tensor) -> bool:
    """Whether weights are the same but for rounding."""
    return found.shape == expected.shape and bool(_apart(found.double(), expected.double()) <= BUFFER_NOISE)


def _slack(found: Mapping[str, Tensor], norm: float, limit: float, precision: str) -> float:
    """The slack that an own clipping scaled by, torch's where it scaled by anything else: limit / (norm + slack) is its share."""
    clipped = whole_norm(found)
    if not (norm > limit and 0 < clipped < math.inf):
        return SLACK
    implied = limit * norm / clipped - norm
    rounding = 16 * torch.finfo(getattr(torch, precision)).eps * norm
    if abs(implied - SLACK) <= rounding or implied > LARGEST_SLACK * norm or implied < -rounding:
        return SLACK
    return 0.0 if implied <= rounding else float(f"{implied:.3g}")


def _compared(found: Mapping[str, Tensor], expected: Gradients, no_gradient: frozenset[str]) -> Iterator[tuple[str, float, float]]:
    """(tensor, relative distance, scale): those of the reference, then strangers."""
    for name, error in distances(found, expected, no_gradient).items():
        right = expected[name]
        along, whole = float((found[name].double() * right).sum()), float((right * right).sum())
        yield name, error, along / whole if whole and name not in no_gradient else math.nan
    whole = whole_norm(expected)  # a tensor that the reference does not have ought to have nothing
    yield from ((name, float(value.double().norm()) / whole, math.nan) for name, value in found.items() if name not in expected)


def _found(kept: Mapping[str, Tensor], step: int, stage: str, expected: Gradients) -> dict[str, Tensor]:
    """A run's tensors of one stage; zeros for what it has no gradient of."""
    if stage == "weight":
        return {name: kept[f"step{step}/after/{name}"].double() - kept[f"step{step}/weights/{name}"].double() for name in expected}
    return {name: torch.zeros_like(value) for name, value in expected.items()} | _left(kept, step, stage)


def _left(kept: Mapping[str, Tensor], step: int, stage: str) -> dict[str, Tensor]:
    """What a run kept of one stage of a step, by the tensor's name."""
    if stage != "reduced":
        head = f"step{step}/{stage}/"
        return {key.removeprefix(head): value for key, value in kept.items() if key.startswith(head)}
    head = f"step{step}/"
    names = {key: key.removeprefix(head) for key in kept if key.startswith(head)}
    return {name: kept[key] for key, name in names.items() if name.partition("/")[0] not in PARTS}


def _kept(folder: Path, moments: Sequence[Moment], steps: Sequence[int]) -> dict[str, Tensor]:
    """What a run kept: of each of these steps the weights and some gradient; what rank 0 was not handed comes from the first rank that was.

    Raises: EvidenceError.
    """
    path = folder / "gradients.safetensors"
    kept = load_file(path) if path.exists() else {}
    for other in sorted(folder.glob("gradients-rank-*.safetensors"), key=lambda found: int(found.stem.rpartition("-")[2])):
        kept = load_file(other) | kept
    missing = [f"step{step}/weights/{name}" for step in steps for name in moments[step].weights]
    missing = [name for name in missing if name not in kept]
    missing += [f"step{step}, its gradients" for step in steps if not any(_left(kept, step, stage) for stage in ("reduced", "clipped"))]
    if missing:
        raise EvidenceError(
            f"{path} lacks {len(missing)} of its tensors ({', '.join(missing[:3])}). The run cannot be compared with the reference. Run it "
            f"again with keep_gradients={len(moments)} and without faults."
        )
    return kept
