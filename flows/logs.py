"""What people read on stderr during a release: each thing once, on one line, and an error only where something broke."""

import logging
import os

from flows.embedded_server import MARK
from validation.errors import ReleaseError

# Names of states in which a gate or a release ends by its own word. The reason was logged a line before by whoever judged.
DECIDED = (
    "Completed", "Fail", "Inconclusive", "Promoted", "Fell back", "Held", "In step", "Mended", "Differs", "Needs a person", "Rolled back",
    "Already there", "Finished", "Overtaken", "Refused", "Scored", "Not answered", "Healthy", "Watch", "Degraded",
)  # fmt: skip


def make_quiet() -> None:
    """Keep Prefect's engine from repeating verdicts and Great Expectations from naming its temporary folders. Repeatable."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(says_once)
    # this module of Great Expectations sets its own level, so that no level above it counts
    logging.getLogger("great_expectations.data_context.types.base").addFilter(is_warning)


def says_once(record: logging.LogRecord) -> bool:
    """Drop the engine's "failed with state" of a verdict (its empty traceback prints as "NoneType: None"), shorten what follows it.

    An error of the release's own comes without a traceback. Other exceptions, crashes, time-outs and states of any other name pass as they
    are.
    """
    text = record.getMessage()
    if text.startswith("View at ") and MARK in os.environ:  # on a server that is gone when somebody follows the link
        return False
    if record.exc_info and isinstance(error := record.exc_info[1], ReleaseError):  # made on purpose: its words say what to do next
        record.msg, record.args, record.exc_info, record.exc_text = f"{type(error).__name__}: {error}", None, None, None
        return True
    if text.startswith(tuple(f"Task run failed with state: {name}(" for name in DECIDED)):
        return False
    for name in DECIDED:
        if text.startswith(f"Finished in state {name}("):
            record.msg, record.args = f"Finished in state {name}", None
    return True


def is_warning(record: logging.LogRecord) -> bool:
    """Whether it is a warning or worse."""
    return record.levelno >= logging.WARNING
