"""How far a run is, for people: turned out of the updates that rank 0 tells its leader. Torch-free."""

from collections import deque

from trainer.world import Event, Progress

PROGRESS_NS = 100_000_000  # between two words of progress to the flow process
THROUGHPUT_NS = 2_000_000_000  # window of the throughput in progress


class Meter:
    """Turns rank 0's updates of one attempt into progress, at most ten times a second."""

    def __init__(self) -> None:
        self._window: deque[tuple[int, int]] = deque()  # (t_ns, samples of that update)
        self._told_ns = 0

    def measure(self, event: Event, *, steps: int | None) -> Progress | None:
        """Progress after this update, or None when the last word was a moment ago."""
        self._window.append((event.t_ns, int(event.fields.get("samples", 0))))
        while event.t_ns - self._window[0][0] > THROUGHPUT_NS and len(self._window) > 2:
            self._window.popleft()
        if event.t_ns - self._told_ns < PROGRESS_NS and event.fields["step"] != steps:
            return None
        self._told_ns = event.t_ns
        seconds = (event.t_ns - self._window[0][0]) / 1e9
        samples = sum(count for _, count in self._window) - self._window[0][1]
        return Progress(
            step=int(event.fields["step"]),
            steps=steps or 0,
            throughput_sps=samples / seconds if seconds > 0 else 0.0,
            loss=float(event.fields.get("loss", float("nan"))),
            attempt=event.attempt,
        )
