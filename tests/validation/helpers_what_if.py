"""Traces of a hybrid-parallel job made by following its schedule, written apart from the replay that is tested with them.

1F1B, or interleaved with several model chunks a stage, as Megatron-LM's schedules are described: a stage warms up with forwards, then
does one forward and one backward in turn, then the backwards that are left.
"""

from collections.abc import Callable
from functools import cache

import pandas as pd

Duration = Callable[..., float]  # (dp_rank, stage, step, optype, number) -> seconds of the operation itself


def schedule(stage: int, stages: int, chunks: int, micro: int) -> list[tuple[str, int, int, int]]:
    """(direction, number among its kind, chunk on this stage, micro-batch) in order of execution."""
    total = micro * chunks
    warm = min(stages - stage - 1 if chunks == 1 else (stages - stage - 1) * 2 + (chunks - 1) * stages, total)

    def virtual(direction, number):
        chunk = number % (stages * chunks) // stages
        chunk = chunk if direction == "forward" else chunks - 1 - chunk
        return direction, number, chunk, number // (stages * chunks) * stages + number % stages

    if chunks == 1:

        def virtual(direction, number):
            return direction, number, 0, number

    order = [virtual("forward", k) for k in range(warm)]
    for k in range(total - warm):
        order += [virtual("forward", warm + k), virtual("backward", k)]
    return order + [virtual("backward", k) for k in range(total - warm, total)]


def trace(*, ranks=2, stages=2, chunks=1, micro=4, steps=3, duration: Duration, no_operations=False, tensor=1) -> pd.DataFrame:
    """A table of operations, and every start and end as the schedule makes them.

    no_operations: also record receives and sends that the ends of the model do not make, as some profilers do.
    """
    rows = []
    for step in range(steps):
        rows += _Step(ranks, stages, chunks, micro, step, duration).rows(no_operations=no_operations, tensor=tensor)
    table = pd.DataFrame(
        rows, columns=["dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id", "gmc"]
    )
    return table.sample(frac=1, random_state=1).reset_index(drop=True)  # order of rows says nothing


class _Step:
    def __init__(self, ranks, stages, chunks, micro, step, duration):
        self.ranks, self.stages, self.chunks, self.micro, self.step = ranks, stages, chunks, micro, step
        self.order = [schedule(stage, stages, chunks, micro) for stage in range(stages)]
        self.own = lambda rank, stage, optype, number: duration(rank, stage, step, optype, number)
        self.compute = cache(self._compute)
        self.transfer = cache(self._transfer)
        self.reduced = cache(self._reduced)

    def position(self, stage, direction, chunk, micro):
        return next(i for i, (d, _, c, m) in enumerate(self.order[stage]) if (d, c, m) == (direction, chunk, micro))

    def peer(self, stage, direction, chunk):
        """(stage, chunk) that a computation gets its input from; None at the end of the model."""
        model_chunk = chunk * self.stages + stage + (-1 if direction == "forward" else 1)
        return divmod(model_chunk, self.stages)[::-1] if 0 <= model_chunk < self.stages * self.chunks else None

    def _gathered(self, chunk, stage):
        """End of the chunk's gather: all ranks together, one chunk after the other."""
        return sum(max(self.own(r, stage, "params-all-gather", c) for r in range(self.ranks)) for c in range(chunk + 1))

    def _compute(self, rank, stage, place):
        """Start and end of the place-th computation of a stage."""
        direction, number, chunk, _ = self.order[stage][place]
        start = self.compute(rank, stage, place - 1)[1] if place else 0.0
        if direction == "forward":
            start = max(start, self._gathered(chunk, stage))
        if self.peer(stage, direction, chunk) is not None:
            start = max(start, self.transfer(rank, stage, place)[2])
        return start, start + self.own(rank, stage, f"{direction}-compute", number)

    def _received(self, stage, direction):
        """Places of computations that get something, in order."""
        return [i for i, (d, _, c, _) in enumerate(self.order[stage]) if d == direction and self.peer(stage, direction, c) is not None]

    def _transfer(self, rank, stage, place):
        """Start of the send, start of the receive, end of both, of the input of a computation."""
        direction, number, chunk, micro = self.order[stage][place]
        source_stage, source_chunk = self.peer(stage, direction, chunk)
        send = self.compute(rank, source_stage, self.position(source_stage, direction, source_chunk, micro))[1]
        earlier = [i for i, (d, n, _, _) in enumerate(self.order[stage]) if d == direction and n == number - 1]
        receive = self.compute(rank, stage, earlier[0])[1] if earlier else 0.0
        before = [i for i in self._received(stage, direction) if i < place]
        if before:
            ended = self.transfer(rank, stage, before[-1])[2]
            send, receive = max(send, ended), max(receive, ended)
        if direction == "backward" and not before:
            first = next(i for i, (d, *_) in enumerate(self.order[stage]) if d == "backward")
            receive = max(receive, self.compute(rank, stage, first - 2)[1] if first >= 2 else 0.0)
        return send, receive, max(send, receive) + self.own(rank, stage, f"{direction}-recv", number)

    def _reduced(self, stage):
        """(start by rank, common end) of the gradients' reduce-scatters, one a chunk, after the last computation."""
        starts = [self.compute(rank, stage, len(self.order[stage]) - 1)[1] for rank in range(self.ranks)]
        found = []
        for chunk in range(self.chunks):
            end = max(starts) + self.own(0, stage, "grads-reduce-scatter", chunk)
            found.append((starts, end))
            starts = [end] * self.ranks
        return found

    def rows(self, *, no_operations, tensor):
        rows = []

        def add(rank, stage, optype, start, end, number, chunk=-1, micro=-1):
            model_chunk = chunk * self.stages + stage if chunk >= 0 else -1
            for lane in range(tensor):
                worker = (rank * self.stages + stage) * tensor + lane
                rows.append((rank, stage, worker, self.step, optype, start, end - start, number, chunk, micro, model_chunk))

        clip_starts = {}
        for rank in range(self.ranks):
            for stage in range(self.stages):
                self._pipeline_rows(rank, stage, add, no_operations)
                for chunk in range(self.chunks):
                    before = self._gathered(chunk - 1, stage) if chunk else 0.0
                    add(rank, stage, "params-all-gather", before, self._gathered(chunk, stage), chunk, chunk)
                for chunk, (starts, end) in enumerate(self.reduced(stage)):
                    add(rank, stage, "grads-reduce-scatter", starts[rank], end, chunk, chunk)
                clip_starts[rank, stage] = end
        clipped = max(clip_starts.values()) + self.own(0, 0, "optimizer-clip-main-grad", 0)
        for (rank, stage), start in clip_starts.items():
            add(rank, stage, "optimizer-clip-main-grad", start, clipped, 0)
            add(rank, stage, "optimizer", clipped, clipped + self.own(rank, stage, "optimizer", 0), 0)
        return rows

    def _pipeline_rows(self, rank, stage, add, no_operations):
        found = []
        for place, (direction, number, chunk, micro) in enumerate(self.order[stage]):
            start, end = self.compute(rank, stage, place)
            add(rank, stage, f"{direction}-compute", start, end, number, chunk, micro)
            if self.peer(stage, direction, chunk) is not None:
                _, receive, ended = self.transfer(rank, stage, place)
                found.append((f"{direction}-recv", receive, ended))
            elif no_operations and self.chunks > 1 and place:
                found.append((f"{direction}-recv", start, start))
            model_chunk = chunk * self.stages + stage + (1 if direction == "forward" else -1)
            if 0 <= model_chunk < self.stages * self.chunks:
                target_chunk, target = divmod(model_chunk, self.stages)
                send, _, ended = self.transfer(rank, target, self.position(target, direction, target_chunk, micro))
                found.append((f"{direction}-send", send, ended))
            elif no_operations and self.chunks > 1:
                found.append((f"{direction}-send", end, end))
        if no_operations:  # before the first and after the last computation
            last = self.compute(rank, stage, len(self.order[stage]) - 1)[1]
            found += [("backward-send", -1e-3, -1e-3), ("forward-recv", last + 1e-3, last + 1e-3)]
        numbers: dict[str, int] = {}
        for optype, start, end in sorted(found, key=lambda item: item[1]):
            numbers[optype] = numbers.get(optype, -1) + 1
            add(rank, stage, optype, start, end, numbers[optype])
