"""What has to be the same bits: everything at every world size for our trainer, everything within a world size for an own one."""

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from validation.completeness import absent_columns, listed
from validation.diagnosis import GRADIENTS, STAGE_WORDS
from validation.diagnosis_kinds import Diagnosis, Kind
from validation.diagnosis_ranks import BitDifference, diagnose_ranks
from validation.equivalence_legs import finished
from validation.records import DIGEST_COLUMNS, STAGES, EquivalenceRecords, Frame, Leg
from validation.verdict import Check, check

EXACT = "the exact reduction adds lanes in one fixed tree, so bits may not depend on ranks (docs/gates/gradient_equivalence.md)"
REPLICAS = "ranks hold copies of one model: the same bits on every rank of a run"
REPEATS = "the same samples at the same weights have one gradient"
COMPARED = tuple(stage for stage in STAGES if stage != "again")
_KEYS = ["step", "stage", "tensor"]


def bit_checks(records: EquivalenceRecords) -> list[Check]:
    """Digests and final states, of the legs that are compared bit for bit."""
    checks = []
    for name in ("exact", "real"):
        legs = finished(records.legs, name)
        checks += [*digest_check(f"{name} leg: digests that differ", legs, across=True), *_state_check(name, legs)]
    unclipped = finished(records.legs, "unclipped")
    name = "own leg: digests that differ between ranks"
    return [*checks, *digest_check(name, finished(records.legs, "own"), across=False, unclipped=unclipped)]


def digest_check(name: str, legs: Sequence[Leg], *, across: bool, unclipped: Sequence[Leg] = ()) -> list[Check]:
    """One check that bits agree; none without digests.

    Args: legs, of one name; across, also between world sizes; unclipped, legs without clipping, which show gradients from before it.
    """
    digests = digests_of(legs, COMPARED)
    if digests.empty:
        return []
    differ = differences(digests, across=across)
    where, action = "", ""
    if len(differ):
        first = differ.iloc[0]
        stage = STAGE_WORDS.get(str(first["stage"]), str(first["stage"]))
        where = f"first at step {first['step']}, {stage}, tensor {first['tensor']}, W={first['world_size']}, rank {first['rank']}"
        action = str(diagnose_ranks(_before_clipping(first_difference(digests, differ), unclipped)))
    source = EXACT if across else REPLICAS
    return [check(name, float(len(differ)), "==", 0, unit="", source=source, where=where, action=action)]


def digests_of(legs: Sequence[Leg], stages: Sequence[str]) -> Frame:
    """All legs' digests of some stages, with the legs' own world sizes; empty when there are none."""
    frames = [leg.digests.assign(world_size=leg.world_size) for leg in legs if not absent_columns(leg.digests, DIGEST_COLUMNS)]
    frames = [frame[frame["stage"].isin(stages)] for frame in frames]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(DIGEST_COLUMNS))


def differences(digests: Frame, *, across: bool) -> Frame:
    """Rows with other bits than the reference, sorted by step, stage, world size, tensor and rank.

    The reference is what most ranks of a world size have, of a tie the lowest rank's; `across` world sizes it is W=1's, where there is one.
    """
    keys = _KEYS if across else ["world_size", *_KEYS]
    rows = digests.assign(sha256=digests["sha256"].fillna(""))
    voters = rows[rows["world_size"] == 1] if across and (rows["world_size"] == 1).any() else rows
    votes = voters.groupby([*keys, "sha256"], as_index=False).agg(
        votes=("rank", "size"), size=("world_size", "min"), lowest=("rank", "min")
    )  # fmt: skip
    votes = votes.sort_values([*keys, "votes", "size", "lowest", "sha256"], ascending=[True] * len(keys) + [False, True, True, True])
    reference = votes.drop_duplicates(keys)[[*keys, "sha256"]].rename(columns={"sha256": "reference"})
    joined = rows.merge(reference, on=keys, how="left")
    joined = joined[joined["sha256"] != joined["reference"]]
    order = [STAGES.index(stage) if stage in STAGES else len(STAGES) for stage in joined["stage"]]
    return joined.assign(order=order).sort_values(["step", "order", "world_size", "tensor", "rank"]).drop(columns="order")


def first_difference(digests: Frame, differ: Frame) -> BitDifference:
    """The signature of the first of some differences. Args: digests, all rows; differ, of `differences`, at least one row."""
    first = differ.iloc[0]
    size, step, stage = int(first["world_size"]), int(first["step"]), str(first["stage"])
    here = differ[(differ["world_size"] == size) & (differ["step"] == step) & (differ["stage"] == stage)]
    moment = digests[(digests["world_size"] == size) & (digests["step"] == step)]
    there = moment[moment["stage"] == stage]
    tensors = tuple(sorted(set(here["tensor"])))
    holders = moment[moment["stage"].isin(GRADIENTS)].groupby("tensor")["rank"].nunique().to_dict()
    earlier = STAGES[: STAGES.index(stage)] if stage in STAGES else ()
    return BitDifference(
        world_size=size, step=step, stage=stage, tensors=tensors, total=int(there["tensor"].nunique()),
        ranks=tuple(sorted(int(rank) for rank in set(here["rank"]))),
        is_between_ranks=bool(there.groupby("tensor")["sha256"].nunique().gt(1).any()),
        agreeing=tuple(name for name in earlier if name in set(moment["stage"])),
        absent=tuple(name for name in tensors if 0 < holders.get(name, 0) < size),
    )  # fmt: skip


def _before_clipping(difference: BitDifference, unclipped: Sequence[Leg]) -> BitDifference:
    """Count ranks as agreeing before clipping where a leg without clipping says so and the step itself shows nothing."""
    digests = digests_of([leg for leg in unclipped if leg.world_size == difference.world_size], ["clipped"])
    digests = digests[digests["step"] == difference.step] if len(digests) else digests
    if difference.stage != "clipped" or digests.empty or digests.groupby("tensor")["sha256"].nunique().gt(1).any():
        return difference
    return replace(difference, agreeing=("reduced",))


def _state_check(name: str, legs: Sequence[Leg]) -> list[Check]:
    held = [(leg.world_size, rank, sha) for leg in legs for rank, sha in enumerate(leg.states) if sha]
    if not held:
        return []
    differ = [(size, rank) for size, rank, sha in held if sha != held[0][2]]
    where = f"first at W={differ[0][0]}, rank {differ[0][1]}" if differ else ""
    action = "start with the first digest that differs; if none does, the optimizer or schedule depends on the rank" if differ else ""
    return [check(f"{name} leg: final states that differ", float(len(differ)), "==", 0, unit="", source=EXACT, where=where, action=action)]


def state_notes(records: EquivalenceRecords) -> list[str]:
    """Final states of an own trainer that differ by rank: a sharded optimizer may do that, so it is said and not judged."""
    split = [leg.world_size for leg in finished(records.legs, "own") if len(set(leg.states)) > 1]
    if not split:
        return []
    return [
        f"Final states differ between ranks at W={listed(split)} where weights, buffers and rates do not: an optimizer of which each "
        "rank holds a part, averages kept on one rank, or moments that drift. kill_and_resume names them."
    ]


# The soak


def repeats(leg: Leg) -> int:
    """How many times a soak computed its gradient again."""
    return int(digests_of([leg], ["again"])["step"].nunique())


def soak_checks(records: EquivalenceRecords) -> list[Check]:
    """Each world size's repeated gradient: one set of bits over repeats and ranks."""
    checks = []
    for leg in finished(records.legs, "soak"):
        digests = digests_of([leg], ["again"])
        if digests.empty:
            continue
        votes = digests.groupby(["tensor", "sha256"], as_index=False).agg(votes=("rank", "size"), first=("step", "min"))
        votes = votes.sort_values(["tensor", "votes", "first", "sha256"], ascending=[True, False, True, True]).drop_duplicates("tensor")
        joined = digests.merge(votes.rename(columns={"sha256": "reference"})[["tensor", "reference"]], on="tensor", how="left")
        differ = joined[joined["sha256"] != joined["reference"]].sort_values(["step", "rank", "tensor"])
        where, action = f"{digests['step'].nunique()} repeats", ""
        if len(differ):
            first = differ.iloc[0]
            where = f"first at repeat {first['step']} of {digests['step'].nunique()}, tensor {first['tensor']}, rank {first['rank']}"
            action = str(_soaked(digests, differ))
        struck = float(differ["step"].nunique())
        name = f"soak leg: repeats that differ at W={leg.world_size}"
        checks.append(check(name, struck, "==", 0, unit="", source=REPEATS, where=where, action=action))
    return checks


def _soaked(digests: Frame, differ: Frame) -> Diagnosis:
    """A fault that comes and goes, or ranks that always disagree."""
    of_rank = digests.groupby(["rank", "tensor"])["sha256"].nunique()
    total, tensors = int(digests["step"].nunique()), sorted(set(differ["tensor"]))
    if of_rank.max() == 1:
        kind: Kind = "no_reduction" if 2 * len(tensors) > digests["tensor"].nunique() else "unreduced_tensors"
        return Diagnosis(kind=kind, words=f"each rank repeats its own bits of {listed(tensors)}, and ranks disagree")
    struck, ranks = differ["step"].nunique(), sorted(set(differ["rank"]))
    if set(differ["step"]) == {0} and total > 2:
        return Diagnosis(
            kind="not_in_state", words=f"{listed(tensors)} came out otherwise the first time: one update leaves the next something"
        )
    rare = "in all repeats: the order of a sum or a random stream changes" if 2 * struck > total else f"in {struck} of {total} repeats"
    return Diagnosis(kind="intermittent", words=f"{listed(tensors)} came out otherwise {rare} (ranks {listed(ranks)})")


def soak_notes(records: EquivalenceRecords) -> list[str]:
    """What the repeats can find, as a probability."""
    legs = finished(records.legs, "soak")
    total = sum(repeats(leg) for leg in legs)
    if not total:
        return []
    sizes = listed(leg.world_size for leg in legs)
    found = 1 - 0.99**total
    return [f"Soak: {total} repeats at W={sizes}; a fault in one of a hundred gradients is found with probability {found:.2f} by them."]
