"""Stacks, last words and signatures are read for what they show."""

import pytest
from helpers_hang import LOST, TIMED_OUT, stack

from validation.flight import Signature, StackFrame, ThreadStack
from validation.hang_signatures import Agreement, agreement, difference, spell
from validation.hang_stacks import main_thread, order_of_lines, order_of_places, standing
from validation.hang_texts import is_echo, is_lost_connection, is_time_out, noted_exception, own_exception, says_exhausted


def test_the_called_operation_is_the_outermost_of_torchs() -> None:
    """A barrier that is made of an all_reduce is a barrier."""
    found = standing(main_thread(stack("all_reduce", "barrier", "train.py:9 step")))

    assert found is not None
    assert (found.op, found.where) == ("barrier", "train.py:9 step")


def test_our_own_recorder_is_no_part_of_the_program() -> None:
    """A stack through the recorder's wrapper ends in the program's line."""
    frames = (StackFrame("/x/trainer/recorded_calls.py", 111, "wait"), *stack("send", "train.py:9 step")[0].frames)
    found = standing(ThreadStack("", True, frames))

    assert found is not None
    assert (found.p2p, found.op, found.where) == ("send", "", "train.py:9 step")


def test_without_a_mark_the_last_thread_is_the_main_one() -> None:
    """As Python's fault handler writes them."""
    threads = tuple(thread._replace(is_main=False) for thread in (*stack("train.py:1 watch"), *stack("train.py:9 step")))

    found = main_thread(threads)
    assert found is not None
    assert found.frames[0].line == 9


@pytest.mark.parametrize("function", ["cleanup", "shutdown", "__exit__", "destroy_process_group", "teardown_all"])
def test_cleanup_is_known_by_its_name(function: str) -> None:
    """Whoever is inside such a function cleans up."""
    found = standing(main_thread(stack("barrier", f"train.py:3 {function}", "train.py:9 step")))

    assert found is not None
    assert found.in_cleanup


def test_lines_are_ordered_within_one_function() -> None:
    """In the innermost function that both stand in; other functions tell nothing."""
    first, second = (standing(main_thread(stack("barrier", frame))) for frame in ("train.py:9 step", "train.py:12 step"))

    assert (order_of_lines(first, second), order_of_lines(second, first), order_of_lines(first, None)) == (-1, 1, 0)
    assert (order_of_places("a.py:3 f", "a.py:4 f"), order_of_places("a.py:3 f", "b.py:4 f")) == (-1, 0)


def test_last_words() -> None:
    """A time-out and a lost connection are echoes; an exception of its own is not."""
    assert (is_time_out(TIMED_OUT), is_lost_connection(TIMED_OUT)) == (True, False)
    assert (is_time_out(LOST), is_lost_connection(LOST)) == (False, True)
    assert not is_echo("ok")
    assert own_exception("ValueError: loss is nan") == "ValueError: loss is nan"
    assert own_exception(LOST) == own_exception(TIMED_OUT) == own_exception("ok") == ""


def test_notes() -> None:
    """Data that ended is no exception."""
    assert says_exhausted("data exhausted")
    assert noted_exception("data exhausted") == ""
    assert noted_exception("exception: KeyError: 'id'")


def test_roles_and_shapes_make_no_difference() -> None:
    """Root and others of a scatter, and shapes of one count, agree."""
    root = agreement(Signature("scatter", ((4,), (4,)), ("Float", "Float"), ((4,),), ("Float",)))
    other = agreement(Signature("scatter", (), (), ((4,),), ("Float",)))

    assert root == other
    assert agreement(Signature("all_reduce", ((4, 4),), ("Float",))) == agreement(Signature("all_reduce", ((2, 8),), ("Float",)))


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (Agreement("all_gather", (8,), ("Float",)), "op_type_mismatch"),
        (Agreement("all_reduce", (9,), ("Float",)), "shape_mismatch"),
        (Agreement("all_reduce", (8,), ("Int",)), "dtype_mismatch"),
        (Agreement("all_reduce", (8,), ("Float",), "max"), "silent_mismatch"),
        (Agreement("all_reduce", (8,), ("Float",), ""), None),
    ],
    ids=["op", "size", "type", "operator", "operator not recorded"],
)
def test_differences(other: Agreement, kind: str | None) -> None:
    """The gravest first; what is not recorded differs from nothing."""
    assert difference(Agreement("all_reduce", (8,), ("Float",), "sum"), other) == kind


def test_spelling() -> None:
    """In words."""
    assert spell(Agreement("all_reduce", (8,), ("Float",), "max")) == "all_reduce of 8 Float (max)"
    assert spell(Agreement("broadcast", (8,), ("Float",), "", 2)) == "broadcast of 8 Float with root 2"
