"""What every benchmark prints: a table for people on stderr and, with --json, one document on stdout."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from validation.canonical import canonical_json

Sample = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One benchmark's result; ratios are taken within one run on one machine."""

    name: str
    peer: str  # what it is compared with
    ratio: float
    goal: float  # of the ratio
    met: bool
    unit: str  # what the ratio is
    samples: Sequence[Sample]  # every measurement, in the order in which it was taken


def parser(text: str) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="one JSON document on stdout")
    made.add_argument("--quick", action="store_true", help="a tiny run that only shows that it works; its numbers mean nothing")
    return made


def progress(text: str) -> None:
    """Tell people how far it is."""
    print(text, file=sys.stderr, flush=True)


def publish(document: Document, *, as_json: bool) -> None:
    """Print the samples and the result."""
    progress(table(document.samples))
    word = "met" if document.met else "missed"
    progress(f"{document.name}: {document.ratio:.4g} {document.unit}; goal {document.goal:g}: {word}")
    if as_json:
        print(canonical_json(document).decode())


def table(rows: Sequence[Sample]) -> str:
    """Rows under one another, columns as wide as they need to be; the first row names the columns."""
    names = list(rows[0]) if rows else []
    cells = [names, *([_shown(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(names))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
