"""The command `seatrial`. Exit codes: 0 promoted or done, 3 refused (fell back or held), 2 bad input, 1 fault.

People's text, progress and logs go to stderr; `--json` prints one JSON document on stdout. Heavy imports wait until they are needed.
"""

import argparse
import contextlib
import gc
import json
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from flows.cli_operations import add_operations
from flows.leaving import RARELY, end_at_once, leave
from validation.errors import ConfigError, InputError, ReleaseError

STOPPED = "seatrial: stopped by {signal}; every rank was ended. What was journalled stays; {next}."
STOPPED_BY_HAND = "seatrial: stopped by hand; every rank was ended. What was written stays: the same command goes on with a training --run."
CHECK_STOPPED = "seatrial: stopped by hand; every rank was ended. Nothing was decided or kept: run `seatrial check` again for a verdict."
EXIT_DONE, EXIT_FAULT, EXIT_INPUT, EXIT_REFUSED = 0, 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; every error a person can mend ends with exit code 2 and a message that says how."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except InputError as error:
        print(f"seatrial: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_INPUT
    except ReleaseError as error:
        print(f"seatrial: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_FAULT
    except KeyboardInterrupt:
        print(STOPPED_BY_HAND, file=sys.stderr)  # noqa: T201
        return EXIT_FAULT


def command() -> None:
    """`main` as a process of its own."""
    gc.set_threshold(RARELY)
    leave(main())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="seatrial", description="A trainer has to survive this before its model may serve.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    release = commands.add_parser("release", help="hold every gate, then promote or fall back")
    release.add_argument("recipe", help="a shipped recipe's name (flights) or package.module:NAME")
    release.add_argument("--policy", type=Path, help="YAML file laid over the default policy")
    release.add_argument("--world-sizes", default="", help="ranks to prove and to measure, e.g. 1,2,4,8 (default: the policy's)")
    release.add_argument("--drill", default="", help="plant a real regression and see it refused: slice-regression")
    release.set_defaults(run=_release)

    gate = commands.add_parser("gate", help="hold one gate of a release again, then decide again")
    gate.add_argument("name")
    gate.add_argument("--release", required=True, metavar="ID")
    gate.set_defaults(run=_gate)

    check = commands.add_parser("check", help="hold gates on a recipe without a release: nothing is registered or served")
    check.add_argument("recipe")
    check.add_argument("--gate", action="append", default=[], help="gradient_equivalence or kill_and_resume (default: both)")
    check.add_argument("--policy", type=Path, help="YAML file laid over the default policy")
    check.add_argument("--world-sizes", default="", help="ranks to prove, e.g. 1,2,4 (default: the policy's)")
    check.set_defaults(run=_check)

    show = commands.add_parser("show", help="what serves and the latest releases, or one release")
    show.add_argument("release_id", nargs="?", default="", metavar="ID")
    show.set_defaults(run=_show)

    _add_train(commands)
    add_operations(commands)

    diagnose = commands.add_parser("diagnose", help="what the dumps of a hung, crashed or slow job say: who, what, why, what to do")
    diagnose.add_argument("folder", type=Path, help="flight-recorder dumps, an incident, a run, a timeline or traces (docs/diagnose.md)")
    diagnose.set_defaults(run=_diagnose)

    drill = commands.add_parser("drill", help="cause a failure for real on a small recipe, and see it found and dealt with")
    drill.add_argument("names", nargs="*", metavar="NAME", help="failure modes, see --list")
    drill.add_argument("--all", action="store_true", help="every one of them (a few minutes)")
    drill.add_argument("--list", action="store_true", help="what there is")
    drill.set_defaults(run=_drill)

    runbook = commands.add_parser("runbook", help="write the runbook's pages from the registry of failure modes")
    runbook.add_argument("--into", type=Path, default=Path("docs"), metavar="FOLDER", help="where they go (default docs)")
    runbook.set_defaults(run=_runbook)

    lab = commands.add_parser("lab", help="the all-reduce scaling model: step time and speed-up by workers")
    lab.add_argument("--workers", default="1,2,4,8,16")
    lab.set_defaults(run=_lab)

    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    return parser


def _add_train(commands: Any) -> None:
    train = commands.add_parser("train", help="train a recipe, with planned faults if you like; a named run can be continued")
    train.add_argument("recipe")
    train.add_argument("--world-size", type=int, default=1, metavar="W", help="ranks (default 1)")
    train.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp", help="whole weights on every rank, or sharded ones")
    train.add_argument("--reduction", choices=("exact", "fast"), default="exact", help="the same bits at every world size, or torch's own")
    train.add_argument("--steps", type=int, metavar="N", help="stop after so many updates (default: all the recipe's epochs)")
    train.add_argument("--fault", action="append", default=[], help="e.g. kill:rank=1,step=7,phase=backward; may be repeated")
    train.add_argument(
        "--checkpoint-every", type=int, metavar="N", help="updates between checkpoints; 0 = none (default 100; 10 with --fault)"
    )
    train.add_argument("--max-restarts", type=int, metavar="N", help="deaths that the run survives (default 3, or what --fault needs)")
    train.add_argument("--resume-world-sizes", default="", metavar="W,W", help="ranks after the first death, the second, ... e.g. 4,2")
    train.add_argument(
        "--run", dest="name", default="", metavar="NAME", help="name the run; one of this name goes on from its newest checkpoint"
    )
    train.add_argument("--mirror", action="store_true", help="copy checkpoints to SEATRIAL_STORE; with --run, start from there if need be")
    train.set_defaults(run=_train)


def _stop_when_told() -> None:
    """Ctrl-C and SIGTERM end a release at once, with its name. Prefect ends the flow run first when it is SIGTERM, then sends it again."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stopped)


def _stopped(number: int, _frame: object) -> NoReturn:
    from flows.ownership import worked_on

    go_on = "`seatrial show` says how far it came"
    if worked_on:
        go_on = f"`seatrial finish {worked_on[0]}` goes on from there, `seatrial show {worked_on[0]}` says how far it came"
    end_at_once(STOPPED.format(signal=signal.Signals(number).name, next=go_on))


def _release(arguments: argparse.Namespace) -> int:
    from flows.surroundings import make_ready

    settings = make_ready(with_server=True)
    from flows.plan import ReleaseRequest, prepare
    from infra.store import open_store

    request = ReleaseRequest(
        recipe=arguments.recipe,
        policy_text=_text_of(arguments.policy),
        world_sizes=_numbers(arguments.world_sizes, "--world-sizes"),
        drill=arguments.drill,
    )
    open_store(settings)  # refuse an unusable store before a second of work
    prepared = prepare(request, settings)
    from flows.embedded_server import at_hand
    from flows.release import release
    from infra.registry import Registry

    Registry(settings)  # and a registry that does not answer
    prepared()
    with at_hand():
        _stop_when_told()
        state: Any = release(request.recipe, request.policy_text, list(request.world_sizes), request.drill, return_state=True)
    try:
        return _decided(state, as_json=arguments.json)
    except ReleaseError:
        _say_where_it_stands(settings, str(state.state_details.flow_run_id))
        raise


def _say_where_it_stands(settings: Any, flow_run_id: str) -> None:
    """Name the release that was begun and has not ended, and what goes on with it. The error itself is told afterwards."""
    from flows.history import release as read_release
    from flows.ownership import flow_run_release
    from infra.store import open_store

    with contextlib.suppress(ReleaseError):  # the store itself may be what does not answer
        store = open_store(settings, writable=False)
        if found := flow_run_release(store, flow_run_id):
            document = read_release(store, found)
            told = f"release {found} is {document['decision']}: {document['reason']}. Once the cause is mended: `seatrial finish {found}`."
            print(f"seatrial: {told}", file=sys.stderr)  # noqa: T201


def _gate(arguments: argparse.Namespace) -> int:
    from flows.surroundings import make_ready

    settings = make_ready(with_server=True)
    from flows.ownership import own, release_owner
    from flows.plan import prepare, request_of
    from infra.journal import Journal
    from infra.store import open_store

    store = open_store(settings)
    journal = Journal(store, arguments.release)
    request = request_of(journal, arguments.name)  # refuse a typing error before a server starts
    release_owner(store, own(store, arguments.release))  # and a release that another process works on
    prepared = prepare(request, settings)
    from flows.embedded_server import at_hand
    from flows.release import rerun_gate
    from infra.registry import Registry

    Registry(settings)
    prepared()
    with at_hand():
        _stop_when_told()
        state = rerun_gate(arguments.name, arguments.release, return_state=True)
    return _decided(state, as_json=arguments.json)


def _decided(state: Any, *, as_json: bool) -> int:
    """Print a finished flow's decision; raise what stopped it if it has none."""
    if state.is_crashed():
        end_at_once(f"seatrial: the flow run crashed ({state.message}). What was journalled stays; `seatrial show` says how far it came.")
    document = state.result(raise_on_failure=False)
    if not isinstance(document, dict):
        state.result()  # raises the exception that ended the flow
        raise ReleaseError(f"the flow ended as '{state.name}' without a decision. Run `seatrial show` to see how far it came.")
    _print_release(document, as_json=as_json)
    return EXIT_DONE if document["decision"] == "promoted" else EXIT_REFUSED


def _check(arguments: argparse.Namespace) -> int:
    from flows.surroundings import make_ready

    settings = make_ready()
    from flows.checking import CHECKABLE, check_document
    from infra.terminal import render_gates

    gates = tuple(dict.fromkeys(arguments.gate)) or CHECKABLE
    world_sizes = _numbers(arguments.world_sizes, "--world-sizes")
    try:
        document = check_document(
            arguments.recipe, gates, world_sizes, settings.home, policy_text=_text_of(arguments.policy), say=_people().print
        )  # fmt: skip
    except KeyboardInterrupt:
        print(CHECK_STOPPED, file=sys.stderr)  # noqa: T201
        return EXIT_FAULT
    if arguments.json:
        _print_json(document)
    else:
        render_gates(document, _people())
    return EXIT_DONE if all(gate["outcome"] == "pass" for gate in document["gates"]) else EXIT_REFUSED


def _show(arguments: argparse.Namespace) -> int:
    from flows import history
    from infra.settings import load_settings
    from infra.store import open_store

    store = open_store(load_settings(), writable=False)
    if arguments.release_id:
        _print_release(history.release(store, arguments.release_id), as_json=arguments.json)
        return EXIT_DONE
    overview = history.overview(store)
    if arguments.json:
        _print_json(overview)
    else:
        _print_overview(overview)
    return EXIT_DONE


def _train(arguments: argparse.Namespace) -> int:
    from flows.surroundings import make_ready

    settings = make_ready()
    from flows.training import TrainRequest, parse_faults, train

    request = TrainRequest(
        recipe=arguments.recipe, world_size=arguments.world_size, parallel=arguments.parallel, reduction=arguments.reduction,
        steps=arguments.steps, faults=parse_faults(arguments.fault), checkpoint_every=arguments.checkpoint_every,
        max_restarts=arguments.max_restarts, resume_world_sizes=_numbers(arguments.resume_world_sizes, "--resume-world-sizes"),
        run=arguments.name, mirror=arguments.mirror,
    )  # fmt: skip
    document = train(settings, request)
    if arguments.json:
        _print_json(document)
    return EXIT_DONE


def _diagnose(arguments: argparse.Namespace) -> int:
    from flows.diagnosing import diagnose_folder

    diagnosis = diagnose_folder(arguments.folder)
    if not arguments.json:
        from flows.diagnosing_view import render

        render(diagnosis, _people())
        return EXIT_DONE
    for problem in diagnosis.problems:
        print(f"seatrial: note: {problem}", file=sys.stderr)  # noqa: T201
    _print_json(diagnosis.document())
    return EXIT_DONE


def _drill(arguments: argparse.Namespace) -> int:
    from flows.drilling import listed, run_drills

    if arguments.list:
        return _listed([f"{row['drill']:<21} {row['fired_by']}" for row in listed()], listed(), as_json=arguments.json)
    if bool(arguments.names) == arguments.all:
        raise ConfigError("name the drills to run, or give --all; nothing was run. `seatrial drill --list` shows them.")
    from flows.surroundings import make_ready

    document = run_drills(arguments.names, make_ready().home, say=partial(_people().print, soft_wrap=True, highlight=False))
    if arguments.json:
        _print_json(document)
    elif document["broken"]:
        _people().print(f"{', '.join(document['broken'])} went wrong; the runs stand in {document['folder']}", soft_wrap=True)
    return EXIT_FAULT if document["broken"] else EXIT_DONE


def _runbook(arguments: argparse.Namespace) -> int:
    from validation.runbook import runbook

    pages = runbook()
    for path, text in pages.items():
        page = arguments.into / path
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    written = [str(arguments.into / path) for path in pages]
    return _listed(written, written, as_json=arguments.json)


def _listed(lines: Sequence[str], document: Any, *, as_json: bool) -> int:
    if as_json:
        _print_json(document)
    else:
        _people().print("\n".join(lines), soft_wrap=True, highlight=False)
    return EXIT_DONE


def _lab(arguments: argparse.Namespace) -> int:
    from validation.lab import lab_table, parse_workers

    rows = lab_table(parse_workers(arguments.workers))
    if arguments.json:
        _print_json(rows)
    else:
        from infra.terminal import render_rows

        render_rows(rows, _people(), title="all-reduce scaling lab: 120 ms local compute, ring and straggler terms")
    return EXIT_DONE


def _print_release(document: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        _print_json(document)
    else:
        from infra.terminal import render_text

        render_text(document, _people())


def _print_overview(overview: dict[str, Any]) -> None:
    from infra.terminal import render_rows
    from validation.canonical import plain

    console = _people()
    serving = [
        {("by release or act" if key == "release_id" else key): value for key, value in row.items()} for row in plain(overview["serving"])
    ]
    render_rows(serving, console, title="what serves")
    render_rows(overview["releases"], console, title="latest releases, newest first")
    if overview["acts"]:
        render_rows(overview["acts"], console, title="latest acts, newest first")
    if not overview["releases"]:
        console.print("No release stands in this store. Start one with `seatrial release flights`.")


def _people() -> Any:
    """Where people's text goes: stderr, so that stdout carries JSON and nothing else. Text from outside is never read as markup."""
    from rich.console import Console

    return Console(stderr=True, markup=False, emoji=False)


def _print_json(value: Any) -> None:
    from validation.canonical import plain

    sys.stdout.write(json.dumps(plain(value), indent=2, sort_keys=False) + "\n")


def _text_of(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the policy file {path} cannot be read: {error}. No release was started. Check the path.") from None


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ConfigError(f"{option} '{text}' are not whole numbers. Nothing was started. Write them like 1,2,4,8.") from None


if __name__ == "__main__":
    command()
