"""What the diagnosis says of a case of examples/hangs: of all its evidence, and of less."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer import ranks
from validation.diagnose import diagnose
from validation.finding import Finding

HANGS = Path(__file__).parents[2] / "examples" / "hangs"
if str(HANGS) not in sys.path:
    sys.path.append(str(HANGS))  # warm processes import from where this one does

from hangs.catalogue import CASES as CASES  # noqa: E402
from hangs.catalogue import Case  # noqa: E402
from hangs.playing import Played  # noqa: E402
from hangs.reading import PLAIN, evidence_of, shuffled, without, wrapped  # noqa: E402
from hangs.scoring import Score, score  # noqa: E402

CALL_S = 60.0  # of one case, its own deadline included
SEED = 7
MISSING, SHUFFLED, WRAPPED = "one dump missing", "shuffled", "wrapped"  # forms of the same evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One case, played once."""

    case: Case
    played: Played
    finding: Finding  # the word that counts
    score: Score
    forms: Mapping[str, Score]  # of less, or other, evidence
    findings: Mapping[str, Finding]  # the same

    @property
    def verdict_s(self) -> float:
        """From the threshold, or from the death, to the verdict."""
        return self.played.last.after_s


def try_case(case: Case, folder: Path, *, entries: int = 0) -> Tried:
    """Play a case in a fresh folder, and judge it in every form. Args: entries of the rings, 0 = the case's own number."""
    played: Played = ranks.call("hangs.playing:play", case.id, str(folder), entries=entries, deadline_s=CALL_S)
    finding = counting(case, played)
    findings = in_other_forms(case, folder)
    return Tried(
        case=case, played=played, finding=finding, score=score(case, finding), findings=findings,
        forms={form: score(case, found) for form, found in findings.items()},
    )  # fmt: skip


def counting(case: Case, played: Played) -> Finding:
    """The finding that is held against the case: of a control any alarm, else the last word."""
    alarms = [look.finding for look in played.looks if score(case, look.finding).mistakes]
    return alarms[0] if case.is_control and alarms else played.last.finding


def in_other_forms(case: Case, folder: Path) -> dict[str, Finding]:
    """The diagnosis of the same evidence without a waiting rank's, in another order, with full rings, and of torch's recorder alone."""
    evidence = evidence_of(folder, case.world_size)
    forms = {SHUFFLED: shuffled(evidence, SEED), WRAPPED: wrapped(evidence)}
    if (lost := waiting_rank(case)) is not None and lost in evidence.ranks:
        forms[MISSING] = without(evidence, lost)
    if any((folder / PLAIN).glob("rank*.json")):
        forms[PLAIN] = evidence_of(folder, case.world_size, part=PLAIN)
    return {form: diagnose(found) for form, found in forms.items()}


def waiting_rank(case: Case) -> int | None:
    """The first rank that is no culprit, where enough others are left to tell; None where there is none, or where each one counts."""
    if case.kind == "all_ranks_same_op":
        return None
    culprits = {rank for ranks_ in case.ranks for rank in ranks_}
    others = [rank for rank in range(case.world_size) if rank not in culprits]
    return others[0] if len(others) >= 3 else None
