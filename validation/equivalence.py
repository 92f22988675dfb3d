"""Gate gradient_equivalence: do W ranks compute what one computes?

Two kinds of legs. The exact leg demands the same bits (gradients, final states, sample order) at every world size and rank. The error legs
measure each tensor's distance to an independent float64 reference in units of that tensor's own float noise.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from validation.completeness import absent_columns, complete, listed
from validation.errors import EvidenceError
from validation.ledger import LedgerDifference, compare_order, ledger_rows
from validation.noise import errors_in_noise, signature, worst_row
from validation.policy import EquivalencePolicy
from validation.records import DIGEST_COLUMNS, GRADIENT_ERROR_COLUMNS, EquivalenceRecords, Frame
from validation.verdict import Check, GateVerdict, Plot, Series, Table, check, conclude, controlled

GATE = "gradient_equivalence"
RERUN = "run the gate again: `seatrial gate gradient_equivalence --release ID`"
EXACT = "the exact reduction adds lanes in one fixed tree, so bits may not depend on ranks (docs/gates/gradient_equivalence.md)"
SHOWN_TENSORS = 30  # in the plot, the worst ones


def judge_equivalence(records: EquivalenceRecords, policy: EquivalencePolicy) -> GateVerdict:
    """Judge that every world size computes the same gradients from the same samples, and the right ones.

    The control judges the planted errors with the same function: its leg "training" must fail, or the verdict is inconclusive.
    """
    verdict = _judge(records, policy)
    planted = _judge(replace(records, errors=records.planted_errors, legs=("training",)), policy)
    return controlled(verdict, records.planted_defect, "training leg", planted)


def _judge(records: EquivalenceRecords, policy: EquivalencePolicy) -> GateVerdict:
    ledgers = _compared(records)
    missing = [*_missing_exact(records, policy), *_missing_order(records, ledgers, policy), *_missing_legs(records, policy)]
    checks = (
        complete(missing, source="every world size, rank and leg that the policy asks for has to be there", action=RERUN),
        *_digest_checks(records),
        *_state_checks(records),
        *_ledger_checks(ledgers),
        *_leg_checks(records, policy),
    )
    sizes = ", ".join(str(size) for size in records.world_sizes)
    return conclude(
        GATE, checks, passed_reason=f"world sizes {sizes} end in the same bits, and every leg stays within the tensors' own float noise",
        tables=(_exact_table(records, ledgers), *_leg_tables(records)), plots=_plots(records, policy), notes=_notes(records),
    )  # fmt: skip


# What is missing


def _missing_exact(records: EquivalenceRecords, policy: EquivalencePolicy) -> list[str]:
    """Name world sizes and ranks without digests or states."""
    if not any(size > 1 for size in records.world_sizes):
        return ["a world size above 1"]
    absent = absent_columns(records.digests, DIGEST_COLUMNS)
    if absent or records.digests.empty:
        return [f"gradient digests ({listed(absent)} absent)" if absent else "gradient digests"]
    filled = records.digests[records.digests["sha256"].fillna("") != ""]
    keys = records.digests[["step", "tensor"]].drop_duplicates()
    held = filled.drop_duplicates(["world_size", "rank", "step", "tensor"]).groupby(["world_size", "rank"]).size().to_dict()
    ranks = [(size, rank) for size in sorted(records.world_sizes) for rank in range(size)]
    missing = [f"gradient digests of W={size}, rank {rank}" for size, rank in ranks if held.get((size, rank), 0) < len(keys)]
    if keys["step"].nunique() < policy.reference_steps.value:
        missing.append(f"gradient digests of {policy.reference_steps.value} steps")
    for size in sorted(records.world_sizes):
        states = records.states.get(size, ())
        if len(states) != size or not all(states):
            missing.append(f"final states of all {size} ranks at W={size}")
    return missing


def _missing_order(records: EquivalenceRecords, ledgers: dict[int, LedgerDifference | str], policy: EquivalencePolicy) -> list[str]:
    missing = [] if records.samples else ["samples to consume"]
    if len(records.expected_order) != records.samples:
        missing.append(f"the expected order of {records.samples} samples (it names {len(records.expected_order)})")
    for size, found in ledgers.items():
        if isinstance(found, str):
            missing.append(f"the ledger at W={size} ({found})")
        elif len(np.unique(ledger_rows(records.ledgers[size])[:, 0])) < policy.steps.value:
            missing.append(f"a ledger of {policy.steps.value} steps at W={size}")
    return missing


def _missing_legs(records: EquivalenceRecords, policy: EquivalencePolicy) -> list[str]:
    """Name legs without rows, without the largest world size, with too few steps or with tensors absent from a step."""
    absent = absent_columns(records.errors, GRADIENT_ERROR_COLUMNS)
    if absent or not records.legs:
        return [f"gradient errors ({listed(absent)} absent)"]
    largest = max(records.world_sizes, default=1)
    missing = []
    for leg in records.legs:
        rows = records.errors[records.errors["leg"] == leg]
        if rows.empty or largest not in set(rows["world_size"]):
            missing.append(f"leg {leg} at W={largest}")
        tensors = rows["tensor"].nunique()
        for size, part in rows.groupby("world_size"):
            steps = part.groupby("step")["tensor"].nunique()
            if len(steps) < policy.reference_steps.value:
                missing.append(f"leg {leg} at W={size}: {policy.reference_steps.value} steps")
            if (steps < tensors).any():
                missing.append(f"leg {leg} at W={size}: some of {tensors} tensors at step {int(steps.index[steps < tensors][0])}")
    return missing


# The exact leg


def _divergences(digests: Frame) -> Frame:
    """Rows whose gradient is not W=1's (where there is no W=1: not the majority's), sorted by step, tensor, world size, rank."""
    key = ["step", "tensor"]
    rows = digests.sort_values([*key, "world_size", "rank"])
    votes = rows.groupby([*key, "sha256"], as_index=False).size().sort_values([*key, "size", "sha256"], ascending=[True, True, False, True])
    single = rows[rows["world_size"] == 1]
    reference = (single if len(single) else votes).drop_duplicates(key)[[*key, "sha256"]]
    joined = rows.merge(reference.rename(columns={"sha256": "reference"}), on=key, how="left")
    return joined[joined["sha256"] != joined["reference"]]


def _digest_checks(records: EquivalenceRecords) -> list[Check]:
    if absent_columns(records.digests, DIGEST_COLUMNS) or records.digests.empty:
        return []
    diverged = _divergences(records.digests)
    where, action = "", ""
    if len(diverged):
        first = diverged.iloc[0]
        where = f"first at step {first['step']}, tensor {first['tensor']}, W={first['world_size']}, rank {first['rank']}"
        action = _digest_signature(records, diverged)
    return [check("gradient digests that differ", float(len(diverged)), "==", 0, unit="", source=EXACT, where=where, action=action)]


def _digest_signature(records: EquivalenceRecords, diverged: Frame) -> str:
    """Say what the first divergent step looks like: which ranks, how many tensors."""
    step = diverged["step"].iloc[0]
    at_step = diverged[diverged["step"] == step]
    rows = records.digests[(records.digests["step"] == step) & records.digests["world_size"].isin(set(at_step["world_size"]))]
    split = rows.groupby(["world_size", "tensor"])["sha256"].nunique().gt(1).any()
    who = (
        "ranks of one world size disagree with each other: the reduction does not give every rank the same result"
        if split
        else "all ranks of a world size agree, but not with the reference: the sum depends on how many ranks there are"
    )
    tensors, total = at_step["tensor"].nunique(), records.digests["tensor"].nunique()
    names = "every tensor" if tensors == total else f"{tensors} of {total} tensors ({listed(sorted(set(at_step['tensor'])))})"
    hint = "samples, weights or normalisation" if tensors == total else "the reduction or random stream of just these tensors"
    return f"{who}; {names} differ at step {step}: look at {hint}"


def _state_checks(records: EquivalenceRecords) -> list[Check]:
    held = [(size, rank, sha) for size in sorted(records.states) for rank, sha in enumerate(records.states[size]) if sha]
    if not held:
        return []
    differ = [(size, rank) for size, rank, sha in held if sha != held[0][2]]
    where = f"first at W={differ[0][0]}, rank {differ[0][1]}" if differ else ""
    action = "start with the first divergent gradient; if none differs, the optimizer or schedule depends on the rank" if differ else ""
    return [check("final states that differ", float(len(differ)), "==", 0, unit="", source=EXACT, where=where, action=action)]


def _compared(records: EquivalenceRecords) -> dict[int, LedgerDifference | str]:
    """Each required world size's ledger against the permutation, or why it cannot be compared."""
    found: dict[int, LedgerDifference | str] = {}
    for size in sorted(set(records.world_sizes)):
        try:
            ledger = records.ledgers.get(size)
            empty = ledger is None or ledger.empty
            found[size] = "it is absent or empty" if ledger is None or empty else compare_order(ledger, records.expected_order)
        except EvidenceError as error:
            found[size] = str(error)
    return found


def _ledger_checks(ledgers: dict[int, LedgerDifference | str]) -> list[Check]:
    return [
        check(
            f"wrong ledger positions at W={size}", float(found.wrong), "==", 0, unit="positions", where=str(found) if found.wrong else "",
            source="data order is a function of seed, epoch and position alone", action="look at the sampler: how lanes map to positions",
        )
        for size, found in ledgers.items() if isinstance(found, LedgerDifference)
    ]  # fmt: skip


# The error legs


def _leg_checks(records: EquivalenceRecords, policy: EquivalencePolicy) -> list[Check]:
    limit = policy.noise_multiple.value
    worst = {leg: worst_row(rows) for leg, rows in _legs(records)}
    bad = [leg for leg, row in worst.items() if not row["in_noise"] <= limit]
    return [
        check(
            f"{leg} leg, worst tensor", float(row["in_noise"]), "<=", limit, unit="x its float noise", source=policy.noise_multiple.source,
            where=f"tensor {row['tensor']}, step {row['step']}, W={row['world_size']}, "
            f"relative error {row['rel_err']:.3g}, noise {row['noise']:.3g}",
            action=f"{signature(errors_in_noise(records.errors, leg), limit)}{_across(leg, bad, list(worst))}" if leg in bad else "",
        )
        for leg, row in worst.items()
    ]  # fmt: skip


def _across(leg: str, bad: Sequence[str], measured: Sequence[str]) -> str:
    """What the other legs' outcome says about a failed one."""
    if leg == "training" and "logic" in measured and "logic" not in bad:
        return "; the float64 leg is clean, so it is a fault of precision, not of logic"
    if bad == ["fast"] and len(measured) > 1:
        return "; the exact legs are clean, so only torch's own reduction is off"
    return ""


def _legs(records: EquivalenceRecords) -> Iterable[tuple[str, Frame]]:
    if absent_columns(records.errors, GRADIENT_ERROR_COLUMNS):
        return
    for leg in records.legs:
        rows = errors_in_noise(records.errors, leg)
        if len(rows):
            yield leg, rows


# For the reader


def _exact_table(records: EquivalenceRecords, ledgers: dict[int, LedgerDifference | str]) -> Table:
    usable = not absent_columns(records.digests, DIGEST_COLUMNS) and len(records.digests) > 0
    diverged = _divergences(records.digests)["world_size"].value_counts().to_dict() if usable else {}
    compared = records.digests["world_size"].value_counts().to_dict() if usable else {}
    rows = tuple(
        (
            size, int(compared.get(size, 0)), int(diverged.get(size, 0)) if usable else None,
            listed((sha[:12] for sha in dict.fromkeys(records.states.get(size, ()))), limit=2), str(ledgers.get(size, "absent")),
        )
        for size in sorted(set(records.world_sizes))
    )  # fmt: skip
    columns = ("world size", "gradient digests", "of them different", "final state sha256", "ledger")
    return Table(title="Exact leg: same bits at every world size", columns=columns, rows=rows)


def _leg_tables(records: EquivalenceRecords) -> list[Table]:
    rows = []
    for leg, errors in _legs(records):
        for size, part in errors.groupby("world_size"):
            worst = worst_row(part)
            counts = (leg, int(str(size)), int(part["tensor"].nunique()), int(part["step"].nunique()))
            numbers = (float(worst["rel_err"]), float(worst["noise"]), float(worst["in_noise"]))
            rows.append((*counts, str(worst["tensor"]), int(worst["step"]), *numbers))
    columns = ("leg", "world size", "tensors", "steps", "worst tensor", "at step", "relative error", "its noise", "error / noise")
    return [Table(title="Distance to the float64 reference", columns=columns, rows=tuple(rows))] if rows else []


def _plots(records: EquivalenceRecords, policy: EquivalencePolicy) -> list[Plot]:
    """Each leg's worst error by tensor; zero and non-finite ratios have no place on a logarithmic axis and stand in the table."""
    series = []
    for leg, rows in _legs(records):
        usable = rows[np.isfinite(rows["in_noise"]) & (rows["in_noise"] > 0)]
        peaks = usable.groupby("tensor")["in_noise"].max().sort_index().nlargest(SHOWN_TENSORS, keep="all").head(SHOWN_TENSORS)
        if len(peaks):
            series.append(Series(name=leg, x=tuple(str(name) for name in peaks.index), y=tuple(float(value) for value in peaks)))
    if not series:
        return []
    return [
        Plot(
            title="Gradient error by tensor", kind="point", x_label=f"tensor (at most the worst {SHOWN_TENSORS} of a leg)",
            y_label="largest error / float noise (dimensionless)", series=tuple(series), y_log=True,
            reference=policy.noise_multiple.value, reference_label="limit",
        )
    ]  # fmt: skip


def _notes(records: EquivalenceRecords) -> tuple[str, ...]:
    dropout = (
        "without dropout: its random streams are covered by the exact leg only" if records.dropout_excluded else "with dropout as trained"
    )
    return (
        f"The legs compared with the reference ran {dropout}.",
        "A fault in the recipe's own loss or model is shared by the reference and cannot be seen here.",
        "Only the probed steps are compared: a fault that strikes rarely, or first in a later epoch, can be missed.",
    )
