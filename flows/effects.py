"""Effects that happen once: an intent in the journal before, a done after, so that any process can take over from a dead one."""

from collections.abc import Callable, Mapping
from typing import Any

from flows.clock import utc_now
from infra.journal import Entry, Journal

Act = Callable[[Mapping[str, Any]], Mapping[str, Any]]  # plan -> result; doing it again with the same plan changes nothing more


def carry_out(journal: Journal, effect: str, of: str, plan: Mapping[str, Any], act: Act) -> Mapping[str, Any]:
    """Do an effect, or what is left of it, and return its result.

    Done before: the recorded result. Intended before: done now with the recorded plan, whatever `plan` says today, since the first process
    may have got anywhere in it. Args: of, what this effect belongs to (a decision's digest, ...): the same effect of something else is
    another effect.
    """
    entries = journal.refreshed()
    done = _latest(entries, "done", effect, of)
    if done is not None:
        return dict(done.payload["result"])
    intended = _latest(entries, "intent", effect, of)
    if intended is None:
        intended = journal.append("intent", {"effect": effect, "of": of, "plan": dict(plan)}, time_utc=utc_now())
    result = act(dict(intended.payload["plan"]))
    journal.append("done", {"effect": effect, "of": of, "result": dict(result)}, time_utc=utc_now())
    return result


def open_effects(entries: tuple[Entry, ...]) -> list[Entry]:
    """Intents without a done: what a dead process left behind."""
    intents = [entry for entry in entries if entry.kind == "intent"]
    return [entry for entry in intents if _latest(entries, "done", entry.payload["effect"], entry.payload["of"]) is None]


def _latest(entries: tuple[Entry, ...], kind: str, effect: str, of: str) -> Entry | None:
    mine = (entry for entry in reversed(entries) if entry.kind == kind)
    return next((entry for entry in mine if (entry.payload["effect"], entry.payload["of"]) == (effect, of)), None)
