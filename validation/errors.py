"""Errors of a release: every message says what happened, what it means and what to do next.

    ReleaseError
    ├── InputError          a person can mend it: exit code 2
    │   ├── RecipeError     the recipe is missing, incomplete or contradicts itself
    │   ├── ConfigError     settings, policy or command-line values that cannot work
    │   └── DataError       an input file is absent, corrupt or not what the recipe says
    ├── EvidenceError       evidence is absent, altered or contradicts itself: judgement was impossible
    ├── StoreError          the object store refused, lost or cannot be reached
    │   └── ConflictError   somebody else wrote first (conditional write lost)
    └── RankError           a rank group died, hung past its deadline or could not start

A failing gate is a verdict, never an exception. No message shows user or password of an address, whatever library said it.
"""

import re
import traceback

_CREDENTIALS = re.compile(r"""(?<=//)(?:[^\s/'"@]*:[^\s'"]*|[^\s/'"]+)@""")  # user:password@ of an address


def without_credentials(text: str) -> str:
    """A text whose addresses have lost user and password: "http://…@host/path"."""
    return _CREDENTIALS.sub("…@", text)


def shown_cause(error: BaseException) -> BaseException | None:
    """The error that caused another, for `raise ... from`; None when its traceback would show a password."""
    told = "".join(traceback.format_exception(error))
    return error if without_credentials(told) == told else None


class ReleaseError(Exception):
    """Base of every error raised by Sea Trial on purpose."""

    def __init__(self, *words: object) -> None:
        super().__init__(*(without_credentials(word) if isinstance(word, str) else word for word in words))


class InputError(ReleaseError):
    """What a person gave cannot be used; nothing was written."""


class RecipeError(InputError):
    """The recipe is missing, incomplete or contradicts itself."""


class ConfigError(InputError):
    """A setting, policy or argument is unknown or out of range."""


class DataError(InputError):
    """An input file is absent, corrupt or not what the recipe says it is."""


class EvidenceError(ReleaseError):
    """Evidence is absent, altered or contradicts itself."""


class StoreError(ReleaseError):
    """The object store could not do what was asked."""


class ConflictError(StoreError):
    """A conditional write lost: somebody else wrote first."""


class RankError(ReleaseError):
    """A group of ranks died, hung past its deadline or could not start."""
