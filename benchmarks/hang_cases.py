"""Hangs, crashes and stragglers before the diagnosis: publicly reported cases, variants of our own, and healthy controls.

    python benchmarks/hang_cases.py [--json] [--quick] [--only ID ...] [--keep FOLDER]

Every case of examples/hangs/hangs/catalogue.py is played by small gloo programs under the recording, watched from outside, and diagnosed
from what it leaves. `ratio` is right / cases over all cases, controls among them: right are kind, culprits and place, of late ranks phase
and cause; any alarm in a control is wrong. The same evidence is judged again with a waiting rank's dumps missing, in another order, with
full rings, and from torch's own flight recorder alone. A whole run writes docs/hang_cases.md.

Peer: torchfrtrace of the installed torch on the same dumps; as shipped it fails on every gloo dump, so its group table is mended first
(benchmarks/support/frtrace.py). It says which ranks it finds at fault and nothing else, so only culprits are compared.

Limits: one program is one way to hang; seconds are of one machine, where two cases at a time share the cores.
"""

import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from support.frtrace import blamed
from support.hangs import CASES, MISSING, PLAIN, SHUFFLED, WRAPPED, Case, Tried, try_case
from support.output import Document, Sample, parser, progress, publish

from trainer import ranks
from trainer.runlog import machine
from validation.finding import Finding, Operation

PAGE = Path(__file__).parents[1] / "docs" / "hang_cases.md"
AT_A_TIME = 2
PEER_S = 60.0
FORMS = {
    MISSING: "a waiting rank's dumps missing", SHUFFLED: "ranks in another order", WRAPPED: "full rings (4 operations a rank)",
    PLAIN: "torch's own recorder alone",
}  # fmt: skip
PeerAnswers = tuple[tuple[int, ...] | str, ...]  # in either order of files


def try_all(cases: Sequence[Case], folder: Path) -> list[tuple[Tried, PeerAnswers]]:
    """Every case in a folder of its own, and what the peer says of it; people are told as it goes."""

    def one(case: Case) -> tuple[Tried, PeerAnswers]:
        root = folder / case.id
        shutil.rmtree(root, ignore_errors=True)
        tried = try_case(case, root)
        word = "right" if tried.score.is_right else "WRONG"
        found = tried.finding
        progress(f"{case.id}: {found.verdict} {found.kind} {list(found.ranks)} {tried.played.seconds:.1f} s: {word}")
        return tried, peer(case, root)

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(one, cases))


def peer(case: Case, root: Path) -> PeerAnswers:
    """Ranks that torchfrtrace finds at fault, in both orders of the files; nothing where there is no dump of torch's."""
    if not any((root / PLAIN).glob("rank*.hang.json")):
        return ()
    ask = "support.frtrace:blamed"
    assert blamed.__module__ == ask.partition(":")[0]
    return tuple(ranks.call(ask, str(root / PLAIN), case.world_size, turned, deadline_s=PEER_S) for turned in (False, True))


def is_peer_right(case: Case, answers: PeerAnswers) -> bool:
    """The culprits, whatever the order of the files; of a control nobody."""
    return bool(answers) and all(not isinstance(answer, str) and answer in case.ranks for answer in answers)


def sample_of(tried: Tried, answers: PeerAnswers) -> Sample:
    """One case as a row."""
    found, score = tried.finding, tried.score
    return {
        "id": tried.case.id, "expected": tried.case.kind, "verdict": found.verdict, "found": found.kind, "ranks": in_words(found.ranks),
        "place": place_of(found.first_visible), "cause": found.cause, "phase": found.phase, "threshold_s": tried.played.last.threshold_s,
        "verdict_s": tried.verdict_s, "right": score.is_right, "wrong_blame": in_words(score.blamed),
        **{form.replace(" ", "_"): tried.forms[form].is_right if form in tried.forms else None for form in FORMS},
        "peer": is_peer_right(tried.case, answers),
    }  # fmt: skip


def in_words(items: Iterable[object]) -> str:
    """Ranks, or ids; a dash for none."""
    return " ".join(map(str, items)) or "-"


def place_of(where: Operation) -> str:
    """Group, operation and number."""
    return f"{where.group}:{where.op}@{where.seq}" if where.op else ""


def page(tried: Sequence[tuple[Tried, PeerAnswers]]) -> str:
    """docs/hang_cases.md."""
    here, every = machine(), [item for item, _ in tried]
    controls, faults = [item for item in every if item.case.is_control], [item for item in every if not item.case.is_control]
    public = [item for item in faults if not item.case.is_own]
    blames = [item.case.id for item in every if item.score.blamed]
    waits = sorted(item.verdict_s for item in faults if item.played.last.why in ("stall", "death"))
    peers = sum(is_peer_right(item.case, answers) for item, answers in tried if not item.case.is_control)
    alarms = sum(not item.score.is_right for item in controls)
    lines = [
        "# Hangs and stragglers: what the diagnosis says of known cases", "",
        f"Written by `python benchmarks/hang_cases.py` on {datetime.now(UTC):%Y-%m-%d} ({here.system}, {here.devices} cores, torch "
        f"{here.torch}); never by hand.", "",
        f"**{right(faults)} of {len(faults)} cases right ({right(public)} of {len(public)} public ones), "
        f"false alarms: {alarms} in {len(controls)} controls; wrong blames: {len(blames)} ({in_words(blames)}).** "
        f"Mistakes with wrong blame counted double: {sum(item.score.mistakes for item in every)}.",
        f"Verdicts stood {waits[len(waits) // 2]:.1f} s (median) and at most {waits[-1]:.1f} s after the threshold or the death, the "
        "second between two snapshots included." if waits else "", "",
        f"torchfrtrace on the same dumps, mended so that it runs: culprits right in {peers} of {len(faults)}; it has no other word.",
        "", "Ids H and N are those of a collection of public reports and of its controls, OWN and CALM are ours. `expected` names the kind "
        "that counts; a few cases have a second one that is as true. Of late ranks, place is phase and cause.", "",
        *by_kind(faults), "", *by_form(every), "", "## Cases", "", *rows_of(public, tried), "", "## Variants of our own", "",
        *rows_of([item for item in faults if item.case.is_own], tried), "", "## Controls: nothing is wrong with these", "",
        *rows_of(controls, tried),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def right(tried: Iterable[Tried]) -> int:
    """How many."""
    return sum(item.score.is_right for item in tried)


def by_kind(faults: Sequence[Tried]) -> list[str]:
    """How many of each kind are right."""
    total = Counter(item.case.kind for item in faults)
    found = Counter(item.case.kind for item in faults if item.score.is_right)
    return ["| kind | cases | right |", "|---|---|---|", *(f"| {kind} | {total[kind]} | {found[kind]} |" for kind in sorted(total))]


def by_form(every: Sequence[Tried]) -> list[str]:
    """The same evidence in other forms: right, wrong blames, false alarms."""
    lines = ["| evidence | judged | right | wrong blames | false alarms |", "|---|---|---|---|---|"]
    for form, words in FORMS.items():
        scores = [(item.case, item.forms[form]) for item in every if form in item.forms]
        alarms = sum(case.is_control and not score.is_right for case, score in scores)
        counts = sum(score.is_right for _, score in scores), sum(bool(score.blamed) for _, score in scores)
        lines.append(f"| {words} | {len(scores)} | {counts[0]} | {counts[1]} | {alarms} |")
    return lines


def rows_of(chosen: Sequence[Tried], tried: Sequence[tuple[Tried, PeerAnswers]]) -> list[str]:
    """A markdown table."""
    answers = {item.case.id: answer for item, answer in tried}
    lines = [
        "| id | what | source | W | expected | found | ranks | place | verdict after, s | right | frtrace |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for item in chosen:
        found, case = item.finding, item.case
        said = found.kind if found.kind in case.kinds else f"**{found.kind}**"
        cells = (
            case.id, case.title, case.source or "own", str(case.world_size), case.kind, said, in_words(found.ranks), where(found),
            f"{item.verdict_s:.1f}" if item.played.last.why in ("stall", "death") else "", "yes" if item.score.is_right else "**no**",
            peer_words(answers[case.id]),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def where(found: Finding) -> str:
    """Place of a hang; phase and cause of a late rank."""
    return f"{found.phase} {found.cause}".strip() if found.cause else place_of(found.first_visible)


def peer_words(answers: PeerAnswers) -> str:
    """Ranks in either order of files, or that it failed."""
    said = dict.fromkeys("fails" if isinstance(answer, str) else in_words(answer) for answer in answers)
    return " or ".join(said)


def main() -> int:
    """Play, judge, write, print."""
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", metavar="ID", help="these cases alone; no page is written")
    options.add_argument("--keep", type=Path, metavar="FOLDER", help="leave what the cases left here")
    arguments = options.parse_args()
    chosen = [case for case in CASES if case.id in arguments.only] if arguments.only else list(CASES)
    if arguments.quick:
        chosen = [case for case in chosen if case.is_quick][:1]
    with tempfile.TemporaryDirectory() as folder:
        tried = try_all(chosen, arguments.keep or Path(folder))
    if not (arguments.quick or arguments.only):
        PAGE.write_text(page(tried))
    every = [item for item, _ in tried]
    progress(f"{right(every)} of {len(every)} right, {sum(bool(item.score.blamed) for item in every)} wrong blames")
    document = Document(
        name="hang_cases", peer="torchfrtrace on the same dumps, mended so that it runs", ratio=right(every) / max(len(every), 1),
        goal=1.0, met=right(every) == len(every), unit="share of cases and controls right", samples=[sample_of(*item) for item in tried],
    )  # fmt: skip
    publish(document, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
