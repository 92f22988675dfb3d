"""What slice_quality shows beside its checks: per slice who it is, what each contender is worth there, and how sure that is."""

from collections.abc import Sequence

from validation.records import SliceRecords
from validation.slice_comparisons import Comparison, Comparisons
from validation.verdict import Plot, Series, Table


def slice_tables(records: SliceRecords, found: Comparisons) -> tuple[Table, ...]:
    """Contenders overall, utility by slice, differences with intervals, calibration, and what was too small to judge."""
    return (
        _contenders(records, found),
        _superiority(records, found),
        _utilities(records, found),
        _differences(records, found),
        _calibration(found),
        Table(
            title="Slices with fewer samples than the policy's min_n",
            columns=("column", "slices", "samples", "share of samples"),
            rows=tuple((column, slices, n, n / found.samples) for column, (slices, n) in found.small.items()),
        ),
    )


def slice_plots(records: SliceRecords, found: Comparisons, *, margin: float) -> tuple[Plot, ...]:
    """Differences by slice in standard deviations of the reference's utility, and confidence beside hit rate."""
    facts = found.facts
    names = tuple(item.slice_name for item in facts)
    said = Series(name="mean confidence", x=names, y=tuple(item.confidence for item in facts))
    came_true = Series(name="hit rate", x=names, y=tuple(item.base_rate for item in facts))
    return (
        Plot(
            title="Candidate's utility against each reference, by slice",
            kind="point",
            x_label="slice",
            y_label="difference (standard deviations of the reference's utility)",
            series=tuple(_in_scales(reference, found.utility) for reference in records.contenders[1:]),
            reference=-margin,
            reference_label="non-inferiority margin",
        ),
        Plot(
            title="Calibration by slice", kind="bar", x_label="slice", y_label="probability (0 to 1)", series=(said, came_true)
        ),
    )  # fmt: skip


def _in_scales(reference: str, utility: Sequence[Comparison]) -> Series:
    rows = [item for item in utility if item.reference == reference]
    scales = [item.scale or 1.0 for item in rows]
    pairs = list(zip(rows, scales, strict=True))
    return Series(
        name=f"against {reference}",
        x=tuple(item.slice_name for item in rows),
        y=tuple(item.observed / scale for item, scale in pairs),
        low=tuple(item.low / scale for item, scale in pairs),
        high=tuple(item.high / scale for item, scale in pairs),
    )


def _contenders(records: SliceRecords, found: Comparisons) -> Table:
    against = {item.reference: item for item in found.overall}
    rows: list[tuple[str | float | None, ...]] = []
    for contender in records.contenders:
        item = against.get(contender)
        utility, loss = records.outcomes[f"utility_{contender}"].mean(), records.outcomes[f"loss_{contender}"].mean()
        ends = (item.observed, item.low, item.high) if item else (None, None, None)
        rows.append((contender, records.quality.get(contender), float(utility), float(loss), *ends))
    unit = records.utility_unit
    columns = ("contender", records.quality_name, f"utility ({unit})", "log loss (nats)", "candidate's difference", "low", "high")
    return Table(title="Contenders on the whole judge set", columns=columns, rows=tuple(rows))


def _superiority(records: SliceRecords, found: Comparisons) -> Table:
    units = {"utility": records.utility_unit, "log loss": "nats"}
    rows = tuple(
        (item.reference, f"{item.column} ({units[item.column]})", item.observed, item.low, item.high, item.status)
        for item in found.superiority
    )
    columns = ("against", "measure", "candidate is better by", "low", "high", "status")
    return Table(title="Is the candidate better on the whole?", columns=columns, rows=rows)


def _utilities(records: SliceRecords, found: Comparisons) -> Table:
    rows: list[tuple[str | float | int | None, ...]] = []
    for item in found.facts:
        worth = tuple(item.utility[contender] for contender in records.contenders)
        rows.append((item.slice_name, item.n, item.clusters, item.base_rate, *worth))
    columns = ("slice", "n", "clusters", "base rate", *(f"utility of {contender}" for contender in records.contenders))
    return Table(title=f"Mean utility by slice ({records.utility_unit})", columns=columns, rows=tuple(rows))


def _differences(records: SliceRecords, found: Comparisons) -> Table:
    rows = tuple(
        (item.slice_name, item.reference, item.n, item.observed, item.low, item.high, item.limit, item.status) for item in found.utility
    )
    columns = ("slice", "against", "n", "difference", "low", "high", "has to be >=", "status")
    return Table(title=f"Candidate's utility less the reference's ({records.utility_unit})", columns=columns, rows=rows)


def _calibration(found: Comparisons) -> Table:
    gaps = {item.slice_name: item for item in found.calibration}
    judged = [(fact, gaps[fact.slice_name]) for fact in found.facts]
    rows = tuple(
        (fact.slice_name, fact.n, fact.confidence, fact.base_rate, gap.observed, gap.low, gap.high, gap.status) for fact, gap in judged
    )
    columns = ("slice", "n", "mean confidence", "hit rate", "gap", "low", "high", "status")
    return Table(title="Candidate's calibration by slice", columns=columns, rows=rows)
