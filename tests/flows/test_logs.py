"""What is kept from stderr, and above all what is not."""

import logging

import pytest

from flows.logs import is_warning, make_quiet, says_once
from validation.errors import StoreError


def line(text: str, level: int = logging.ERROR) -> logging.LogRecord:
    """A record as Prefect's engine makes it."""
    return logging.LogRecord("prefect.task_runs", level, __file__, 1, text, None, None)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("Task run failed with exception: ValueError('x')", id="an exception"),
        pytest.param("Task run failed with state: Failed(message='x', type=FAILED, result=None)", id="a state that is no verdict"),
        pytest.param("Finished in state Failed('Task run encountered an exception ValueError: x')", id="how an exception ends"),
        pytest.param("Finished in state TimedOut('x')", id="a time-out"),
        pytest.param("Crash detected! Execution was aborted", id="a crash"),
        pytest.param("scaling: FAIL in 5.1 s: 100% of x", id="a gate's own line"),
    ],
)
def test_what_broke_is_told_whole(text: str) -> None:
    """Whatever is not a verdict passes as it is."""
    record = line(text)

    assert says_once(record)
    assert record.getMessage() == text


def test_a_verdict_is_not_told_as_a_failure() -> None:
    """The engine's line on a returned verdict, with its traceback of no exception, is dropped."""
    assert not says_once(line("Task run failed with state: Fail(message='x is 1, has to be 2', type=FAILED, result=None)"))


@pytest.mark.parametrize("name", ["Fail", "Inconclusive", "Promoted", "Fell back", "Held", "Completed"])
def test_the_end_of_a_run_is_short(name: str) -> None:
    """The state's name is enough where its reason was told a line before."""
    record = line(f"Finished in state {name}('50% of a long reason')")

    assert says_once(record)
    assert record.getMessage() == f"Finished in state {name}"


@pytest.mark.parametrize(("error", "is_whole"), [(StoreError("it is away"), False), (ValueError("x"), True)], ids=["ours", "a bug"])
def test_an_error_of_our_own_comes_without_a_traceback(error: Exception, is_whole: bool) -> None:
    """Its words say what happened and what to do; a bug keeps its traceback."""
    record = line(f"Encountered exception during execution: {error!r}")
    record.exc_info = (type(error), error, None)

    assert says_once(record)
    assert (record.exc_info is not None) == is_whole
    assert is_whole or record.getMessage() == "StoreError: it is away"


def test_making_quiet_twice_filters_once() -> None:
    """Each flow run of a process may ask again."""
    make_quiet()
    make_quiet()

    assert logging.getLogger("prefect.task_runs").filters.count(says_once) == 1
    assert logging.getLogger("great_expectations.data_context.types.base").filters.count(is_warning) == 1
