"""Writing down a process's operations as they begin and end, by standing in for the methods through which Python asks for them."""

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import get_ident
from time import time_ns
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
import typing_extensions
from torch.distributed import distributed_c10d as c10d

from trainer import recorded_layout as at
from trainer import recorded_torch
from trainer.recorded_torch import CALLS, Call, ProcessGroup, Work
from trainer.ring import RingWriter, signature_text
from validation.flight import Signature

_TORCH = str(Path(torch.__file__).parent) + "/"
_OWN = str(Path(__file__).parent / "record")  # this module and its like
_LIBRARY = (
    _TORCH,
    _OWN,
    *(str(module.__file__) for module in (contextlib, functools, typing_extensions, warnings)),
)


class Stand(Protocol):
    """Where the program stands."""

    def entered(self, now_ns: int) -> tuple[int, int, int]:
        """An operation begins. Returns: its labels: step, micro-batch and phase's number of this thread."""

    def waited(self, nanoseconds: int) -> None:
        """The main thread spent so long inside of an operation."""

    def world_changed(self, *, is_left: bool) -> None:
        """The group of all ranks was formed or dissolved."""


class _Known:
    """A group as its operations need it."""

    __slots__ = ("counts_p2p", "issued", "number", "p2p", "ranks", "signatures", "text")

    def __init__(self, text: str, number: int, ranks: tuple[int, ...], *, counts_p2p: bool) -> None:
        self.text, self.number, self.ranks, self.counts_p2p = text, number, ranks, counts_p2p
        self.p2p = self.issued = 0
        self.signatures: dict[Any, int] = {}  # what `_describer` told -> number of the text


class Calls:
    """The stand-ins of one recording. Whatever goes wrong in them, the operation itself is made as if they were not there."""

    def __init__(self, ring: RingWriter, stand: Stand) -> None:
        self._ring = ring
        self._stand = stand
        self._texts = ring.texts
        self._generation = ring.texts.generation
        self._groups: dict[int, _Known] = {}  # by id: holding a group would keep it alive
        self._made = 0
        self._places: dict[tuple[CodeType, int], int] = {}
        self._inner: dict[CodeType, bool] = {}
        self._open: dict[int, int] = {}  # id of a Work -> serial of its operation
        self._most_open = ring.layout.entries
        self._main = threading.get_ident()
        self._undo = ExitStack()

    def install(self) -> None:
        """Stand in from now on."""
        for name, original in recorded_torch.methods().items():
            self._replace(ProcessGroup, name, self._method(original, CALLS[name]))
        self._replace(Work, "wait", self._wait(Work.__dict__["wait"]))
        self._replace(Work, "is_completed", self._is_completed(Work.__dict__["is_completed"]))
        self._replace(Work, "get_future", self._get_future(Work.__dict__["get_future"]))
        for name, around in zip(recorded_torch.GROUP_HOOKS, (self._new_group, self._world_changed), strict=True):
            if hasattr(c10d, name):
                self._undo.enter_context(recorded_torch.hooked(c10d, name, around))

    def remove(self) -> None:
        """Put back what was there before."""
        self._undo.close()

    def _replace(self, owner: Any, name: str, stand_in: Callable[..., Any]) -> None:
        self._undo.callback(setattr, owner, name, owner.__dict__[name])
        setattr(owner, name, stand_in)

    def _method(self, original: Callable[..., Any], call: Call) -> Callable[..., Any]:
        enter, opened, describe = self._enter, self._open, _describer(call)

        def stand_in(group: Any, *args: Any, **kwargs: Any) -> Any:
            began_ns = time_ns()
            serial = enter(call, describe, group, args, began_ns)
            try:
                work = original(group, *args, **kwargs)
            except BaseException:
                self._fail(serial)
                raise
            if work is None:
                self._leave(serial, began_ns)
            elif serial:
                opened[id(work)] = serial
            return work

        return stand_in

    def _wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        opened = self._open

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            serial = opened.pop(id(work), 0)
            if not serial:
                return original(work, *args, **kwargs)
            began_ns = time_ns()
            try:
                done = original(work, *args, **kwargs)
            except BaseException:
                self._fail(serial)
                raise
            self._leave(serial, began_ns)
            return done

        return wait

    def _is_completed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def is_completed(work: Any) -> Any:
            done = original(work)
            if done and (serial := self._open.pop(id(work), 0)):
                self._ring.left(serial, time_ns())
            return done

        return is_completed

    def _get_future(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_future(work: Any) -> Any:
            if serial := self._open.get(id(work), 0):
                self._ring.flag(serial, at.FUTURE_FLAG)
            return original(work)

        return get_future

    def _enter(self, call: Call, describe: Callable[..., Any], group: Any, args: tuple[Any, ...], now_ns: int) -> int:
        """Record that an operation begins; 0 when that cannot be done."""
        try:
            if self._generation != self._texts.generation or len(self._open) > self._most_open:
                self._renew()
            known = self._groups.get(id(group)) or self._learn(group)
            step, micro, phase = self._stand.entered(now_ns)
            key = describe(args)
            signature = known.signatures.get(key)
            if signature is None:
                signature = known.signatures[key] = self._texts.number(signature_text(_signature(call, known, args)))
            flags = at.P2P_FLAG if call.is_p2p else 0
            thread = get_ident() & 0xFFFFFFFF
            place, seq = self._place(sys._getframe(2)), self._next(known, group, is_p2p=call.is_p2p)
            return self._ring.operation(now_ns, seq, known.number, signature, place, step, micro, phase, flags, thread)
        except Exception:  # recording must never end what it records
            return 0

    def _leave(self, serial: int, began_ns: int) -> None:
        now_ns = time_ns()
        if serial:
            self._ring.left(serial, now_ns)
        if get_ident() == self._main:
            self._stand.waited(now_ns - began_ns)

    def _fail(self, serial: int) -> None:
        if serial:
            self._ring.flag(serial, at.FAILED_FLAG)
            self._ring.left(serial, time_ns())

    def _next(self, known: _Known, group: Any, *, is_p2p: bool) -> int:
        """The number of the operation that begins, as torch's flight recorder counts: send and recv apart."""
        if is_p2p:
            known.p2p += 1
            return known.p2p
        known.issued += 1
        counted = recorded_torch.sequence(group)
        return counted + 1 - (known.p2p if known.counts_p2p else 0) if counted >= 0 else known.issued

    def _place(self, frame: FrameType | None) -> int:
        """The first line outside of torch and of recording; the outermost one when there is none."""
        last, inner = frame, self._inner
        while frame is not None:
            code = frame.f_code
            is_inner = inner.get(code)
            if is_inner is None:
                is_inner = inner[code] = code.co_filename.startswith(_LIBRARY)
            last = frame
            if not is_inner:
                break
            frame = frame.f_back
        assert last is not None  # somebody called
        key = (last.f_code, last.f_lasti)
        number = self._places.get(key)
        if number is None:
            words = f"{Path(last.f_code.co_filename).name}:{last.f_lineno} {last.f_code.co_name}"
            number = self._places[key] = self._texts.number(words)
        return number

    def _learn(self, group: Any) -> _Known:
        found = recorded_torch.members(group)
        self._made += 1
        text = self._ring.group(found.name, found.ranks, found.description, self._made, found.backend)
        # gloo's own numbers count send and recv, too, which torch's flight recorder does not
        known = self._groups[id(group)] = _Known(text, self._texts.number(text), found.ranks, counts_p2p="gloo" in found.backend)
        return known

    def _renew(self) -> None:
        """Ask for new numbers of the texts before the old ones are overwritten, and forget what nobody waited for."""
        self._generation = self._texts.generation
        self._places.clear()
        for known in list(self._groups.values()):
            known.signatures.clear()
            known.number = self._texts.number(known.text)
        if len(self._open) > self._most_open:
            self._open.clear()

    def _new_group(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A group is made, on its members and on the others."""
        made = original(*args, **kwargs)
        self._groups.pop(id(made[0]), None)  # of one that is gone, whose id is the new one's
        ranks = args[2] if len(args) > 2 else kwargs.get("global_ranks_in_group")
        name = args[5] if len(args) > 5 else kwargs.get("group_name")
        if ranks and name:
            self._made += 1
            self._ring.group(str(name), tuple(ranks), str(kwargs.get("group_desc") or "undefined"), self._made)
        return made

    def _world_changed(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_left = not args or args[0] is None
        if is_left:
            self._groups.clear()
        self._stand.world_changed(is_left=is_left)
        return original(*args, **kwargs)


def _describer(call: Call) -> Callable[[tuple[Any, ...]], Any]:
    """What makes one call unlike another, quickly told: a key for `_signature`, good within one group."""
    op, inputs, outputs, options, reduces, has_root, peer, tag = call

    def describe(args: tuple[Any, ...]) -> Any:
        given = _shapes(args[inputs]) if inputs >= 0 else ()
        taken = given if outputs == inputs else _shapes(args[outputs]) if outputs >= 0 else ()
        if peer >= 0:
            return op, given, taken, args[peer], args[tag] if tag < len(args) else 0
        if options < 0 or options >= len(args):
            return op, given, taken
        chosen = args[options]
        return op, given, taken, hash(chosen.reduceOp) if reduces else -1, chosen.rootRank if has_root else -1

    return describe


def _signature(call: Call, known: _Known, args: tuple[Any, ...]) -> Signature:
    given = _flat(args[call.inputs]) if call.inputs >= 0 else []
    taken = _flat(args[call.outputs]) if call.outputs >= 0 else []
    options = args[call.options] if 0 <= call.options < len(args) else None
    reduce_op = options.reduceOp.op.name.lower() if call.reduces and options is not None else ""
    root = known.ranks[options.rootRank] if call.has_root and options is not None else -1
    peer = known.ranks[args[call.peer]] if call.peer >= 0 else -1
    tag = args[call.tag] if 0 <= call.tag < len(args) else 0
    return Signature(
        call.op, tuple(tuple(tensor.shape) for tensor in given), tuple(recorded_torch.type_name(tensor.dtype) for tensor in given),
        tuple(tuple(tensor.shape) for tensor in taken), tuple(recorded_torch.type_name(tensor.dtype) for tensor in taken),
        reduce_op, root, peer, tag,
    )  # fmt: skip


def _shapes(value: Any) -> Any:
    """(shape, type) of a tensor, or nested tuples of them."""
    if type(value) is list:
        if len(value) == 1 and type(value[0]) is not list:
            tensor = value[0]
            return tensor.shape, tensor.dtype
        return tuple(map(_shapes, value))
    return value.shape, value.dtype


def _flat(value: Any) -> list[torch.Tensor]:
    return [tensor for part in value for tensor in _flat(part)] if isinstance(value, list | tuple) else [value]
