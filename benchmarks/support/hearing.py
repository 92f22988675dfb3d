"""What the gates say about a case of examples/mutants: which one saw it, where it first diverges, and what kind it is taken for."""

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flows.checking import check
from validation.diagnosis_kinds import KINDS
from validation.errors import RecipeError
from validation.verdict import Check, GateVerdict, Outcome

MUTANTS = Path(__file__).parents[2] / "examples" / "mutants"
if str(MUTANTS) not in sys.path:
    sys.path.append(str(MUTANTS))  # warm processes import from where this one does

from mutants.catalogue import CASES as CASES  # noqa: E402
from mutants.catalogue import GRADIENT, REFUSED, Case  # noqa: E402


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """One case before one gate."""

    case: Case
    outcome: str  # "pass" | "fail" | "inconclusive" | "refused"
    check: str  # the first that failed, "" when none did
    where: str  # its tensor, step, rank, world size; for a refusal the reason
    kind: str  # of the first divergence, see validation.diagnosis_kinds; "" when there is none
    words: str  # what it looks like and what to do
    in_noise: float  # how large, in units of the tensor's own float noise; NaN where noise has no say
    seconds: float

    @property
    def gate(self) -> str:
        """Who stopped it; "" when nobody did."""
        return {"fail": self.case.gate if self.case.gate != REFUSED else GRADIENT, REFUSED: REFUSED}.get(self.outcome, "")

    @property
    def is_right(self) -> bool:
        """A control passes; a mutant is stopped by a gate that may."""
        return self.outcome == "pass" if self.case.is_control else self.gate in (self.case.gate, *self.case.also)

    @property
    def is_named(self) -> bool:
        """Whether what is said names the right tensor and kind, where the case asks for one."""
        said = f"{self.where} {self.words}"
        if self.outcome in ("pass", REFUSED):
            return True
        return self.case.tensor in said and (not self.case.kinds or self.kind in self.case.kinds)


def hear(case: Case, folder: Path, *, policy_text: str = "", say: Callable[[str], None] = lambda _text: None) -> Heard:
    """Hold the case's gate on its recipe in a fresh folder. Args: policy_text, as `seatrial check --policy` reads it; "" = the default."""
    began = time.monotonic()
    gate = GRADIENT if case.gate == REFUSED else case.gate
    try:
        verdict = check(case.recipe, [gate], case.world_sizes, folder, policy_text=policy_text, say=say)[gate]
    except RecipeError as error:
        seconds = time.monotonic() - began
        return Heard(
            case=case, outcome=REFUSED, check="", where=str(error), kind="", words="", in_noise=float("nan"), seconds=seconds
        )  # fmt: skip
    return _heard(case, verdict, time.monotonic() - began)


def _heard(case: Case, verdict: GateVerdict, seconds: float) -> Heard:
    failed = sorted((item for item in verdict.checks if item.passed is not True), key=lambda item: item.passed is not False)
    first = failed[0] if failed and verdict.outcome is not Outcome.PASS else None  # what is wrong before what is missing
    return Heard(
        case=case, outcome=str(verdict.outcome), check=first.name if first else "", where=first.where if first else "",
        kind=kind_of(verdict), words=verdict.reason + " " + verdict.action, in_noise=noise_of(failed), seconds=seconds,
    )  # fmt: skip


def kind_of(verdict: GateVerdict) -> str:
    """The kind whose next step the verdict names; "" when it passed or names none."""
    if verdict.outcome is Outcome.PASS:
        return ""
    said = [verdict.action, *(item.action for item in verdict.checks if item.passed is False)]
    return next((kind for text in said for kind, meaning in KINDS.items() if meaning.next_step in text), "")


def noise_of(failed: list[Check]) -> float:
    """The largest error in units of float noise among failed checks; NaN when none is measured in it."""
    sizes = [item.observed for item in failed if re.search("noise", item.unit) and isinstance(item.observed, float)]
    return max(sizes, default=float("nan"))
