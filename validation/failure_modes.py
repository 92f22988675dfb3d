"""The ways in which this pipeline is known to fail: the one registry that drills, readiness and the runbook are made from.

The rows stand in `failure_modes_*`, by what they are about. Each mode has a drill of the same name (`seatrial drill NAME`), and each kind
of finding leads to exactly one mode.
"""

from collections.abc import Mapping
from dataclasses import replace

from validation.failure_modes_collectives import COLLECTIVES
from validation.failure_modes_processes import PROCESSES
from validation.failure_modes_release import RELEASE
from validation.failure_modes_slow import SLOW
from validation.failure_modes_storage import STORAGE
from validation.records import FailureMode

BAD_RELEASE = "bad_release_served"  # in a release its drill is read off the fallback checks
NOBODY_YET = "the owner on the recipe's card"
# chapter of the runbook -> its modes
CHAPTERS: Mapping[str, tuple[FailureMode, ...]] = {
    "Processes": PROCESSES, "Collectives": COLLECTIVES, "Slowness": SLOW, "Checkpoints and the store": STORAGE, "The release": RELEASE,
}  # fmt: skip


def default_modes(owner: str = NOBODY_YET) -> tuple[FailureMode, ...]:
    """List every failure mode; `owner` is the recipe card's, who answers for all of them until told otherwise."""
    return tuple(replace(mode, owner=owner) for modes in CHAPTERS.values() for mode in modes)


def mode_of_kind(kind: str) -> FailureMode:
    """Return the mode, and with it the page, that a finding of this kind leads to. Raises KeyError for a kind that nobody listed."""
    return {listed: mode for mode in default_modes() for listed in mode.kinds}[kind]
