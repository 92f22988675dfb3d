"""Recording what one rank does, always on: its operations with the other ranks, steps and phases, heartbeats, collections, exceptions.

    recording = Recording.start(folder, rank, world_size)   # before init_process_group, so that groups are seen from the first
    recording.step(3); recording.phase("forward"); ...      # where the program stands
    recording.close()

All of it lies in a ring file (trainer/ring.py) that outlives the process, and is read by others (trainer/evidence.py). Works in any
program over torch.distributed. Recording never ends what it records: without room on the disk it goes on in memory.
"""

import atexit
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from trainer import recorded_layout as at
from trainer import recorded_torch
from trainer.recorded_calls import Calls
from trainer.recorded_notes import Notes
from trainer.recorded_stacks import answer_with_stacks
from trainer.ring import RingWriter, ring_path

BEAT_S = 0.2
SILENT_NS = 100_000_000  # a heartbeat that comes so much too late is written down
GC_NS = 5_000_000  # a collection that takes so long is written down; shorter ones only add up
SWITCH = "SEATRIAL_RECORDING"  # "off" in the environment: nothing is recorded (for measuring what recording costs)
_PLACES = {name: place for place, name in enumerate(at.PHASES)}
_OTHER = _PLACES["other"]


class Recording:
    """One process's recording; there is one at a time, see `current`."""

    def __init__(self, ring: RingWriter) -> None:
        self.ring = ring
        self._step, self._micro, self._phase = -1, -1, ring.phase_of("")
        self._place = _OTHER
        self._since_ns = self._began_ns = time.time_ns()
        self._arrival_ns = 0
        self._phase_ns, self._inside_ns, self._gc_ns = [0] * len(at.PHASES), [0] * len(at.PHASES), 0
        self._names = {name: (ring.phase_of(name), _PLACES.get(name, _OTHER)) for name in at.PHASES}
        self._aside: dict[int, tuple[int, int, int]] = {}  # thread -> labels of its own
        self._notes = Notes(ring)
        self._gc_began_ns, self._beaten_ns = 0, time.monotonic_ns()
        self._end = threading.Event()
        self._calls = Calls(ring, self)
        self._server: recorded_torch.Server | None = None
        self._main = threading.main_thread().ident or 0

    @classmethod
    def start(cls, folder: Path | str, rank: int, world_size: int, *, attempt: int = 0, entries: int = 2048) -> Self:
        """Begin to record this process, in place of an earlier recording of it.

        Args: folder, of the run (the ring is then under flight/ in it), or the path of a ring, which ends in .ring.
        """
        if (earlier := current()) is not None:
            earlier.close()
        path = Path(folder) if str(folder).endswith(".ring") else ring_path(Path(folder), attempt, rank)
        try:
            ring = RingWriter(path.absolute(), rank=rank, world_size=world_size, entries=entries)
        except OSError as error:
            sys.stderr.write(
                f"rank {rank}: {path} cannot be made ({error}), so a hang of this rank could not be explained. Training goes on.\n"
            )
            ring = RingWriter(None, rank=rank, world_size=world_size, entries=entries)
        recording = cls(ring)
        recording._begin()
        return recording

    def _begin(self) -> None:
        global _CURRENT
        self.beat()
        self.phase("setup")
        self._calls.install()
        if self.ring.path is not None:
            self.ring.stack_signal(answer_with_stacks(self.ring.path.with_suffix(".stack")))
        gc.callbacks.append(self._collected)
        self._notes.watch()
        if recorded_torch.has_world():
            self._serve()
        atexit.register(self._stop_serving)
        _CURRENT = self
        threading.Thread(target=self._beat_on, daemon=True, name="recording").start()

    def step(self, number: int, phase: str = "data") -> None:
        """A step (0-based) begins, with this phase; the one before is over."""
        now_ns = time.time_ns()
        self._end_step(now_ns)
        self._step, self._micro, self._began_ns, self._arrival_ns = number, -1, now_ns, 0
        self._stand(phase, now_ns)
        self._notes.came_to(number)

    def phase(self, name: str) -> None:
        """A phase begins; time from here on is its. Nothing happens when it is under way."""
        known = self._names.get(name)
        if known is None or known[0] != self._phase:
            self._stand(name, time.time_ns())

    def micro(self, number: int, phase: str = "forward") -> None:
        """A micro-batch (0-based) of the step begins, with this phase."""
        self._micro = number
        self._stand(phase, time.time_ns())

    def arrive(self) -> None:
        """This rank's own work of the step is done, and its peers are needed; the last call of a step counts, else its first operation."""
        self._arrival_ns = time.time_ns()

    def note(self, text: str) -> None:
        """Keep what the program says of itself, in place of what it said before."""
        self._notes.say(text)

    def failed(self, error: BaseException) -> None:
        """Keep what is about to end the program, or was raised and is dealt with now."""
        self._notes.raised(error)

    @contextmanager
    def aside(self, step: int, phase: str) -> Iterator[None]:
        """Inside, this thread's operations bear labels of their own: it works behind the main one."""
        thread = threading.get_ident()
        self._aside[thread] = (step, -1, self.ring.phase_of(phase))
        try:
            yield
        finally:
            del self._aside[thread]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.failed(error)
        self.close(done=error is None)

    def close(self, *, done: bool = True) -> None:
        """Stop recording; the ring stays. Args: done, the program came to its end: that is then its phase."""
        global _CURRENT
        if self._end.is_set():
            return
        self._end_step(time.time_ns())
        if done:
            self.phase("done")
        self._end.set()
        self._calls.remove()
        self._notes.unwatch()
        with suppress(ValueError):
            gc.callbacks.remove(self._collected)
        self._stop_serving()
        atexit.unregister(self._stop_serving)
        if _CURRENT is self:
            _CURRENT = None

    def waited(self, nanoseconds: int) -> None:
        """The main thread spent so long inside of an operation."""
        self._inside_ns[self._place] += nanoseconds

    def entered(self, now_ns: int) -> tuple[int, int, int]:
        """An operation begins. Returns: its labels: step, micro-batch and phase's number of this thread."""
        if self._aside and (own := self._aside.get(threading.get_ident())):
            return own
        if not self._arrival_ns:
            self._arrival_ns = now_ns
        if (error := sys.exc_info()[1]) is not None:
            self._notes.raised(error)
        return self._step, self._micro, self._phase

    def world_changed(self, *, is_left: bool) -> None:
        """The group of all ranks was formed or dissolved: torch's own records can be asked for from now on, or the program is through."""
        if is_left:
            self.phase("done")
        else:
            self._serve()

    def _serve(self) -> None:
        if self._server is None:
            self._server = recorded_torch.Server()
            self.ring.address(self._server.address)

    def _stop_serving(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            self.ring.address("")
            server.close()

    def _stand(self, name: str, now_ns: int) -> None:
        self._phase_ns[self._place] += now_ns - self._since_ns
        known = self._names.get(name)
        if known is None:
            known = self._names[name] = (self.ring.phase_of(name), _OTHER)
        self._phase, self._place = known
        self._since_ns = now_ns
        self.ring.mark(self._step, self._micro, known[0], now_ns)

    def _end_step(self, now_ns: int) -> None:
        self._phase_ns[self._place] += now_ns - self._since_ns
        self._since_ns = now_ns
        if self._step >= 0:
            self.ring.step(self._step, self._began_ns, self._arrival_ns, now_ns, self._phase_ns, self._inside_ns, self._gc_ns)
        self._phase_ns, self._inside_ns, self._gc_ns = [0] * len(at.PHASES), [0] * len(at.PHASES), 0

    def beat(self) -> None:
        """Show that the interpreter is not held, say how long it was, and see what the main thread deals with."""
        wall_ns, now_ns = time.time_ns(), time.monotonic_ns()
        self.ring.beat(wall_ns, now_ns)
        late_ns, self._beaten_ns = now_ns - self._beaten_ns - int(BEAT_S * 1e9), now_ns
        if late_ns > SILENT_NS:
            self.ring.event("silent", wall_ns - late_ns, late_ns, self._step, self._phase)
        self._notes.look(self._main)

    def _beat_on(self) -> None:
        while not self._end.wait(BEAT_S):
            self.beat()

    def _collected(self, moment: str, facts: dict[str, int]) -> None:
        now_ns = time.time_ns()
        is_full = facts.get("generation") == 2  # may take seconds: who looks meanwhile sees what it is
        if moment == "start":
            self._gc_began_ns = now_ns
            if is_full:
                self.ring.mark(self._step, self._micro, self.ring.phase_of("gc"), now_ns)
            return
        if is_full:
            self.ring.mark(self._step, self._micro, self._phase, self._since_ns)
        lasted_ns = now_ns - self._gc_began_ns
        self._gc_ns += lasted_ns
        if lasted_ns > GC_NS:
            self.ring.event("gc", self._gc_began_ns, lasted_ns, self._step, self._phase)


_CURRENT: Recording | None = None


def current() -> Recording | None:
    """This process's recording, if there is one."""
    return _CURRENT


@contextmanager
def recording_of(folder: Path, rank: int, world_size: int, *, attempt: int) -> Iterator[None]:
    """Record what is done inside, unless SWITCH says otherwise; what it raises is noted."""
    if os.environ.get(SWITCH, "") == "off":
        yield
        return
    with Recording.start(folder, rank, world_size, attempt=attempt):
        yield


def _forget() -> None:
    """A forked child shares the ring's memory and is not the rank: it writes nothing."""
    global _CURRENT
    if _CURRENT is not None:
        _CURRENT._calls.remove()
        with suppress(ValueError):
            gc.callbacks.remove(_CURRENT._collected)
        _CURRENT._notes.unwatch()
        _CURRENT = None


os.register_at_fork(after_in_child=_forget)
