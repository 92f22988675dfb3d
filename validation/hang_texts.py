"""What a rank's last words say: a time-out, a lost connection, or an exception of its own."""

import re

_TIMED_OUT = re.compile(r"timed?[ _-]?out|timeout|deadline exceeded", re.I)
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by peer|broken pipe|socket (closed|error)|remote (process|worker)|"
    r"peer (is )?(gone|died|exited)|connectionerror|eoferror|network error",
    re.I,
)
_BACKEND = re.compile(
    r"\bgloo\b|/gloo/|\bnccl\b|DistBackendError|ProcessGroup|TCPStore|op\.preamble|enforce fail|a rank left out a collective",
    re.I,  # the last one is our own check of the ranks' steps
)
_OUT_OF_STEP = re.compile(r"a rank left out a collective")
_STOPPED = re.compile(r"^(SystemExit|KeyboardInterrupt|GeneratorExit)\b")
_RAISED = re.compile(r"\b[A-Z]\w*(Error|Exception|Interrupt|Exit)\b|^Traceback|out of memory|\bOOM\b", re.I)
_EXHAUSTED = re.compile(
    r"exhaust|no more (data|batches|samples)|StopIteration|out of data|data (is )?(over|finished|ended)|end of (data|epoch)", re.I
)


def is_well(result: str) -> bool:
    """It ended as it should."""
    return result.strip().lower() == "ok"


def is_time_out(result: str) -> bool:
    """A wait was given up."""
    return bool(_TIMED_OUT.search(result)) and not is_well(result)


def is_lost_connection(result: str) -> bool:
    """A peer went away."""
    return bool(_LOST.search(result)) and not is_time_out(result)


def is_echo(result: str) -> bool:
    """It says what happened to others: a time-out, a lost connection, the backend's own check, a stop from outside."""
    return (
        bool(result)
        and not is_well(result)
        and bool(is_time_out(result) or _LOST.search(result) or _BACKEND.search(result) or _STOPPED.search(result))
    )


def own_exception(result: str) -> str:
    """The exception that the rank itself raised; "" = none."""
    text = result.strip()
    return "" if not text or is_well(text) or is_echo(text) else text


def noted_exception(note: str) -> str:
    """The exception that a note holds, the first of several lines that is the rank's own; "" = none."""
    lines = (line.strip() for line in note.splitlines())
    return next((text for text in lines if _RAISED.search(text) and not is_echo(text) and not says_exhausted(text)), "")


def says_exhausted(text: str) -> bool:
    """The rank's data came to an end."""
    return bool(_EXHAUSTED.search(text))


def says_out_of_step(text: str) -> bool:
    """Our own check found the ranks at different steps: whoever says so only noticed."""
    return bool(_OUT_OF_STEP.search(text))
