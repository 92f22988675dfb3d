"""The commands for what comes after a release was judged: who may let it through, what serves, what it costs.

Each asks one function of one module for a document with "ok", and shows `lines` of it, or all of it with --json.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Mapping
from typing import Any

EXIT_DONE, EXIT_REFUSED = 0, 3


def add_operations(commands: Any) -> None:
    """Add the commands to the parser."""
    verify = _command(commands, "verify", "flows.verifying", "verify", "check evidence, signatures, pointer and aliases")
    verify.add_argument("what", metavar="ID", help="a release's id, or a model's name: what serves now")

    finish = _command(commands, "finish", "flows.finishing", "finish", "take over a release whose process died, and bring it to its end")
    finish.add_argument("release_id", metavar="ID")
    finish.add_argument("--take-over", action="store_true", help="the process that worked on it, on another machine, is gone for sure")

    abandon = _command(commands, "abandon", "flows.finishing", "abandon", "end a release whose process died without a decision")
    abandon.add_argument("release_id", metavar="ID")
    abandon.add_argument("--reason", required=True)
    abandon.add_argument("--take-over", action="store_true", help="the process that worked on it, on another machine, is gone for sure")

    approve = _command(commands, "approve", "flows.approving", "approve", "say yes, or no, to a release that waits for a person")
    approve.add_argument("release_id", metavar="ID")
    approve.add_argument("--by", required=True, metavar="NAME", help="who says so")
    approve.add_argument("--reason", required=True)
    approve.add_argument("--refuse", action="store_true", help="say no")

    waive = _command(commands, "waive", "flows.approving", "waive", "let one gate that did not pass count as a conditional pass")
    waive.add_argument("gate")
    waive.add_argument("--release", dest="release_id", required=True, metavar="ID")
    waive.add_argument("--by", required=True, metavar="NAME", help="who takes the risk")
    waive.add_argument("--reason", required=True)
    waive.add_argument("--days", type=float, required=True, metavar="N", help="for how long it counts")

    _add_serving(commands)


def _add_serving(commands: Any) -> None:
    """What comes after a decision: what serves, how it does, what it costs."""
    rollback = _command(commands, "rollback", "flows.rollback", "roll_back", "put an earlier verified version in service")
    rollback.add_argument("model")
    rollback.add_argument("--to", dest="version", default="", metavar="VERSION", help="default: last known-good, else the baseline")
    rollback.add_argument("--by", default="", metavar="NAME")
    rollback.add_argument("--reason", required=True)

    reconcile = _command(commands, "reconcile", "flows.reconcile", "reconcile_models", "compare registry and pointer, mend what differs")
    reconcile.add_argument("models", nargs="*", metavar="MODEL", help="default: every model that serves")
    reconcile.add_argument("--dry-run", action="store_true", help="only say what differs")

    predict = _command(commands, "predict", "flows.predict", "predict", "score a day's requests with what serves, and keep the scores")
    predict.add_argument("model")
    predict.add_argument("--day", required=True, metavar="YYYY-MM-DD")

    monitor = _command(commands, "monitor", "flows.monitor", "monitor", "judge what serves by what became of its predictions")
    monitor.add_argument("model")
    monitor.add_argument("--day", default="", metavar="YYYY-MM-DD", help="the day it is (default: today, UTC)")
    monitor.add_argument("--dry-run", action="store_true", help="never roll back")

    replay = _command(
        commands, "replay", "flows.replay", "replay", "December of flights day by day under the monitor, clean or with a fault"
    )
    replay.add_argument("--regression", default="", metavar="NAME", help="stale-weights, lost-history, stale-features or dead-feed")
    replay.add_argument("--seed", type=int, default=None, metavar="N", help="draw the days anew (default: the month as it was)")
    replay.add_argument("--begins", type=int, default=8, metavar="N", help="day of December on which the fault begins (default: 8)")

    cost = _command(commands, "cost", "flows.costing", "cost", "what a release costs and waits for, by releases a week and devices")
    cost.add_argument("release_id", nargs="?", default="", metavar="ID", help="whose costs (default: the latest release)")
    cost.add_argument("--per-week", default="1,2,5,10,20,50", help="releases a week")
    cost.add_argument("--devices", default="1,2,3,4")
    cost.add_argument("--seed", type=int, default=0)

    up = _command(commands, "up", "flows.up", "up", "both UIs on this machine, until stopped")
    up.add_argument("--postgres", action="store_true", help="Prefect and MLflow on PostgreSQL, artifacts and evidence in S3, and a worker")
    up.add_argument("--into", default="", metavar="FOLDER", help="where the servers keep their data (default: <home>/servers)")


def _command(commands: Any, name: str, module: str, function: str, words: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
    parser.set_defaults(run=_run, module=module, function=function)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    """Call module.function(settings, say=..., **arguments), print what it says."""
    from rich.console import Console

    from flows.surroundings import make_quiet_place

    settings = make_quiet_place()
    console = Console(stderr=True, markup=False, emoji=False, soft_wrap=True, highlight=False)
    given = {name: value for name, value in vars(arguments).items() if name not in ("run", "module", "function", "json")}
    module = importlib.import_module(arguments.module)
    document: Mapping[str, Any] = getattr(module, arguments.function)(settings, say=console.print, **given)
    if arguments.json:
        from validation.canonical import plain

        sys.stdout.write(json.dumps(plain(document), indent=2) + "\n")
    else:
        for line in module.lines(document):
            console.print(line)
    return EXIT_DONE if document["ok"] else EXIT_REFUSED
