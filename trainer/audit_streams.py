"""Who drew random numbers, from which generator, and in which state it was found. Two equal states are the same numbers twice.

Seen are the generators that everybody shares: torch's (of the CPU, and of the GPU where there is one), numpy's `np.random` and Python's
`random`. Generators that somebody made for himself are not seen. A state is the first 16 hex digits of sha256.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Variable

DIGITS = 16
SEARCHED = 1000  # blocks of a Mersenne Twister (624 words each) that a fetch may draw and still be followed: a few ms
_WORDS = 624


class Generator(NamedTuple):
    """One generator that everybody shares."""

    name: str
    read: Callable[[], Any]  # its state, a value that compares
    body: Callable[[Any], bytes]
    went_on: Callable[[Any, Any], bool]  # did drawing lead from one state to the other, or was it seeded in between?


def torch_state() -> bytes:
    """State of torch's generator on the CPU."""
    return torch.default_generator.get_state().numpy().tobytes()


def gpu_in_use() -> bool:
    """Has this process started a GPU? Asking does not start one."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _cuda_state() -> bytes:
    return torch.cuda.get_rng_state().numpy().tobytes()


def _same_seed(before: bytes, after: bytes) -> bool:
    """Torch's states begin with the seed that the generator was started with, uint64."""
    return before[:8] == after[:8]


class _Numpy(NamedTuple):
    kind: str
    key: bytes  # of the Mersenne Twister; of another kind of generator all of its state
    rest: tuple[int, int, float]  # where it stands in the key, and the second of two normal numbers


def _numpy_state() -> _Numpy:
    state: dict[str, Any] = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return _Numpy(state["bit_generator"], repr(state).encode(), (0, 0, 0.0))
    return _Numpy("MT19937", state["state"]["key"].tobytes(), (state["state"]["pos"], state["has_gauss"], state["gauss"]))


def _numpy_went_on(before: _Numpy, after: _Numpy) -> bool:
    if before.kind != "MT19937" or before.key == after.key:
        return before.kind == after.kind
    spare = np.random.RandomState()
    spare.set_state(("MT19937", np.frombuffer(before.key, dtype=np.uint32), *before.rest))
    for _ in range(SEARCHED):
        spare.bytes(4 * _WORDS)
        if spare.get_state(legacy=False)["state"]["key"].tobytes() == after.key:
            return True
    return False


def _python_went_on(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    spare = random.Random()  # a copy, to be followed
    spare.setstate(before)
    for _ in range(SEARCHED):
        if spare.getstate()[1][:_WORDS] == after[1][:_WORDS]:
            return True
        spare.getrandbits(32 * _WORDS)
    return False


_SHARED = (
    Generator("torch", torch_state, bytes, _same_seed),
    Generator("numpy", _numpy_state, lambda state: repr(tuple(state)).encode(), _numpy_went_on),
    Generator("python", random.getstate, lambda state: repr(state).encode(), _python_went_on),
)
_CUDA = Generator("torch", _cuda_state, bytes, _same_seed)


class Draw(NamedTuple):
    """A generator that somebody drew from."""

    generator: str
    state: str  # in which it was found; of one that was seeded anew meanwhile: where it was left, marked as such


@contextmanager
def watched(found: list[Draw]) -> Iterator[None]:
    """Note which generators move inside. Those that are put back to where they were did not move."""
    generators = (*_SHARED, _CUDA) if gpu_in_use() else _SHARED
    before = [generator.read() for generator in generators]
    yield
    for generator, state in zip(generators, before, strict=True):
        now = generator.read()
        if now != state:
            found.append(Draw(generator.name, _digest(generator, state, now)))


def watch_backward(loss_sum: Tensor, tell: Callable[[Draw], None]) -> None:
    """Tell which generators move while this loss's backward pass runs: a forward pass that is computed again with other masks."""

    def begun(_: Tensor) -> None:
        found: list[Draw] = []
        watch = watched(found)
        watch.__enter__()

        def ended() -> None:
            watch.__exit__(None, None, None)
            for draw in found:
                tell(draw)

        Variable._execution_engine.queue_callback(ended)

    if loss_sum.requires_grad:
        loss_sum.register_hook(begun)  # type: ignore[no-untyped-call]


def _digest(generator: Generator, before: Any, after: Any) -> str:
    if generator.went_on(before, after):
        return _hex(generator.body(before))
    return _hex(b"seeded meanwhile, left as " + generator.body(after))


def _hex(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:DIGITS]
