"""What the ranks of a group have to agree on in one collective, and how two answers differ."""

from math import prod
from typing import NamedTuple

from validation.finding import FindingKind
from validation.flight import Signature

BARRIERS = frozenset({"barrier", "monitored_barrier"})
_ANY_SPLIT = ("all_to_all",)  # each rank has splits of its own
_BY_OUTPUT = ("scatter",)  # only the root has inputs
_PER_RANK_SIZES = ("all_gather", "gather", "all_to_all", "scatter", "reduce_scatter")  # some backends allow other sizes on each rank
_LEAVES_EARLY = ("broadcast", "reduce", "gather", "scatter", "send", "isend")  # a rank may be through before the others came


class Agreement(NamedTuple):
    """One rank's part of a collective, cut down to what has to be alike on every rank of the group."""

    op: str
    elements: tuple[int, ...] = ()  # of each tensor that has to be alike; shapes of one count are harmless
    dtypes: tuple[str, ...] = ()
    reduce_op: str = ""
    root: int = -1


def agreement(signature: Signature) -> Agreement:
    """Cut a signature down to what has to be alike; roles (root of a gather or scatter) and shapes of one count make no difference."""
    op = signature.op.lstrip("_")
    if op in BARRIERS:
        return Agreement(op)
    sizes, dtypes = signature.sizes, signature.dtypes
    if op.startswith(_BY_OUTPUT):
        sizes, dtypes = signature.output_sizes, signature.output_dtypes
    elements = tuple(prod(size) for size in sizes)
    if op.startswith(_BY_OUTPUT) or op.startswith("gather"):
        elements, dtypes = elements[:1], dtypes[:1]
    if op.startswith(_ANY_SPLIT):
        elements, dtypes = (), tuple(sorted(set(dtypes)))
    return Agreement(op, elements, dtypes, signature.reduce_op.lower(), signature.root)


def difference(one: Agreement, other: Agreement) -> FindingKind | None:
    """Name how two ranks disagree at one place of their group's order, the gravest first; None when they agree as far as is known."""
    if one.op != other.op:
        return "op_type_mismatch"
    if sum(one.elements) != sum(other.elements):
        return "shape_mismatch"
    if one.dtypes != other.dtypes and one.dtypes and other.dtypes:
        return "dtype_mismatch"
    if one.root != other.root and -1 not in (one.root, other.root):
        return "root_mismatch"
    if one.reduce_op != other.reduce_op and one.reduce_op and other.reduce_op:
        return "silent_mismatch"
    return None


def may_differ_in_size(op: str) -> bool:
    """Whether some backends complete this operation with other sizes on each rank."""
    return op.startswith(_PER_RANK_SIZES)


def waits_for_all(op: str) -> bool:
    """Whether no rank can be through this operation before every rank has entered it."""
    return not op.startswith(_LEAVES_EARLY)


def spell(one: Agreement) -> str:
    """The operation in words: "all_reduce of 16 Float"."""
    text = one.op
    if one.elements:
        text += f" of {'+'.join(map(str, one.elements))} {'/'.join(dict.fromkeys(one.dtypes))}".rstrip()
    if one.reduce_op and one.reduce_op != "sum":
        text += f" ({one.reduce_op})"
    return text if one.root < 0 else f"{text} with root {one.root}"
