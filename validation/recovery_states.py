"""Whole states compared by name: what a load brought back beside what was saved, and where a killed run first parts from its twin.

States are tables with records.STATE_COLUMNS, rows in any order. Names: "weight/fc.bias", "optimizer/fc.bias/exp_avg", "plain/groups/0/lr",
"plain/schedule/last_epoch", "plain/position", "stream/torch" ... (trainer/audit_state.py).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from validation.completeness import absent_columns
from validation.diagnosis_kinds import Kind
from validation.diagnosis_state import ORDER, class_of
from validation.records import STATE_COLUMNS, Frame

SAVED, LOADED, END = "saved", "loaded", "end"
# A sampler may count in another way after a load and a stream may be started anew at every step: these alone are no loss. What a loss of
# them does is seen in the samples and the states that follow.
TOLD_ONLY: tuple[Kind, ...] = ("position", "random_streams")
RATE = r"plain/groups/\d+/lr"  # the same at every world size, whatever the order of a sum


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDifference:
    """Named parts that are not what they should be at one moment of a run."""

    attempt: int
    moment: str  # SAVED, LOADED or END
    step: int  # updates done
    ranks: tuple[int, ...]  # on which they differ, ascending
    names: tuple[str, ...]  # the parts, in the order of diagnosis_state.ORDER; () when nothing differs
    compared: int  # parts that could be compared, over all ranks
    expected: Mapping[str, str]  # name -> sha256 on the first of those ranks, as it should be; {} when nothing differs
    found: Mapping[str, str]

    @property
    def lost(self) -> tuple[str, ...]:
        """The parts whose difference is a loss by itself."""
        return tuple(name for name in self.names if class_of(name) not in TOLD_ONLY)

    @property
    def words(self) -> str:
        """When, where and what, e.g. "loaded at step 10 on rank 1: optimizer/fc.weight/exp_avg and 11 more"."""
        whose = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {', '.join(map(str, self.ranks))}"
        what = self.lost or self.names
        more = f" and {len(what) - 1} more" if len(what) > 1 else ""
        return f"{self.moment} at step {self.step} on {whose}: {what[0]}{more}"


def readable(states: Frame) -> bool:
    """Whether there are states to compare."""
    return not states.empty and not absent_columns(states, STATE_COLUMNS)


def kinds_held(states: Frame) -> dict[Kind, int]:
    """How many parts of each kind a state holds: of the last state of the lowest rank."""
    end = states[(states["moment"] == END) & (states["rank"] == states["rank"].min())]
    counts = Counter(class_of(str(name)) for name in end["name"])
    return {kind: counts[kind] for kind in ORDER if counts[kind]}


def loads(states: Frame) -> list[tuple[int, int]]:
    """(attempt, step) of every load of a checkpoint, in order."""
    loaded = states[(states["moment"] == LOADED) & (states["step"] > 0)]
    return sorted({(int(attempt), int(step)) for attempt, step in zip(loaded["attempt"], loaded["step"], strict=True)})


def unsaved_loads(states: Frame) -> list[tuple[int, int]]:
    """Loads of states that no row says were saved: there is nothing to compare them with."""
    return [load for load in loads(states) if _saved_before(states, *load).empty]


def load_differences(states: Frame, *, same_ranks: bool) -> list[StateDifference]:
    """Compare what every load brought back with what was saved at that step by an earlier attempt.

    Rank by rank where as many ranks load as saved, else with the parts that every rank saved alike. same_ranks, False where a change of
    the number of ranks may change the position and the streams.
    """
    found = []
    for attempt, step in loads(states):
        saved = _saved_before(states, attempt, step)
        if saved.empty:
            continue
        loaded = _at(states, LOADED, attempt, step)
        difference = _difference(loaded, saved, attempt=attempt, moment=LOADED, step=step, skipped=() if same_ranks else TOLD_ONLY)
        found.append(difference)
    return found


def twin_differences(states: Frame, twin: Frame, *, only: str = "") -> list[StateDifference]:
    """Compare every state that a run saved, and its last, with the twin's after as many updates, in the order of the run.

    Args: only, a pattern that the compared names match; "" for all. Steps at which the twin saved nothing are left out.
    """
    found = []
    moments = states[states["moment"] != LOADED][["attempt", "moment", "step"]].drop_duplicates()
    for attempt, moment, step in sorted(moments.itertuples(index=False), key=lambda row: (row[0], row[2], row[1] == END)):
        expected = twin[(twin["moment"] == moment) & (twin["step"] == step)]
        if expected.empty:
            continue
        run = _at(states, moment, attempt, step)
        if only:
            run, expected = (side[side["name"].str.fullmatch(only)] for side in (run, expected))
        found.append(_difference(run, expected, attempt=int(attempt), moment=str(moment), step=int(step)))
    return found


def shared_streams(states: Frame) -> list[tuple[int, int, tuple[int, ...]]]:
    """(attempt, step, ranks) of states, out of training, in which ranks have one random stream in one state; in the order of the run."""
    streams = states[states["name"].str.startswith("stream/") & (states["moment"] != LOADED)]
    holders: dict[tuple[int, int, str, str], set[int]] = {}
    columns = (streams[name].tolist() for name in ("attempt", "step", "name", "sha256", "rank"))
    for attempt, step, name, sha, rank in zip(*columns, strict=True):
        holders.setdefault((attempt, step, name, sha), set()).add(rank)
    return sorted({(attempt, step, tuple(sorted(ranks))) for (attempt, step, _, _), ranks in holders.items() if len(ranks) > 1})


def _saved_before(states: Frame, attempt: int, step: int) -> Frame:
    """What the newest attempt before this one that saved this step saved."""
    saved = states[(states["moment"] == SAVED) & (states["step"] == step) & (states["attempt"] < attempt)]
    newest: Frame = saved[saved["attempt"] == saved["attempt"].max()]
    return newest


def _at(states: Frame, moment: str, attempt: int, step: int) -> Frame:
    return states[(states["moment"] == moment) & (states["attempt"] == attempt) & (states["step"] == step)]


def _difference(found: Frame, expected: Frame, *, attempt: int, moment: str, step: int, skipped: Sequence[Kind] = ()) -> StateDifference:
    """Parts that differ or are there on one side only, on each rank of `found`."""
    here, there = _by_rank(found), _by_rank(expected)
    first, *others = there.values()
    alike = {name: sha for name, sha in first.items() if all(other.get(name) == sha for other in others)}
    own = {name for state in there.values() for name in state} - alike.keys()  # each rank its own: another one has nothing to compare with
    differ: dict[str, list[int]] = {}
    sides: dict[int, tuple[dict[str, str], dict[str, str]]] = {}
    for rank, state in here.items():
        wanted = there.get(rank, {}) if len(here) == len(there) else alike
        got = state if len(here) == len(there) else {name: sha for name, sha in state.items() if name not in own}
        sides[rank] = _without(wanted, skipped), _without(got, skipped)
        for name in _differing(*sides[rank]):
            differ.setdefault(name, []).append(rank)
    ranks = sorted({rank for ranks in differ.values() for rank in ranks})
    shown = sides[ranks[0]] if ranks else ({}, {})
    names = tuple(sorted(differ, key=lambda name: (ORDER.index(class_of(name)), name)))
    return StateDifference(
        attempt=attempt, moment=moment, step=step, ranks=tuple(ranks), names=names,
        compared=sum(len(wanted.keys() | got.keys()) for wanted, got in sides.values()), expected=shown[0], found=shown[1],
    )  # fmt: skip


def _by_rank(states: Frame) -> dict[int, dict[str, str]]:
    """Rank -> name -> sha256, of one moment."""
    made: dict[int, dict[str, str]] = {}
    for rank, name, sha in zip(states["rank"], states["name"], states["sha256"], strict=True):
        made.setdefault(int(rank), {})[str(name)] = str(sha)
    return dict(sorted(made.items()))


def _without(state: Mapping[str, str], kinds: Sequence[Kind]) -> dict[str, str]:
    return {name: sha for name, sha in state.items() if class_of(name) not in kinds}


def _differing(wanted: Mapping[str, str], got: Mapping[str, str]) -> list[str]:
    return [name for name in wanted.keys() | got.keys() if wanted.get(name) != got.get(name)]
