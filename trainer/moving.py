"""Running statistics that the forward pass changes (BatchNorm), made the same at every world size.

A plain loop would leave whatever the last micro-batch of a rank wrote. Here every micro-batch starts from the values at the step's
beginning, and the step ends with the mean over all micro-batches, added in the lanes' tree: running = (1 - m) * running + m * mean of the
micro-batches' statistics, for BatchNorm's momentum m. Whole numbers (num_batches_tracked) and flags advance by what one micro-batch adds.
Normalisation itself uses the statistics of one micro-batch, whose samples are the same wherever it runs ("ghost" batch normalisation,
Hoffer, Hubara, Soudry 2017).
"""

import torch
from torch import Tensor, nn


class MovingBuffers:
    """The buffers of a model that its forward pass changes; n values in all, 0 when there are none."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], like: Tensor) -> None:
        """Args: names, of the buffers that move; like, a parameter: values travel in its type and on its device."""
        places = {name: name.rpartition(".") for name in names}
        self._places = [(model.get_submodule(owner), attribute) for owner, _, attribute in places.values()]
        self._like = like
        self._start = [buffer.clone() for buffer in self._buffers]
        self.size = sum(buffer.numel() for buffer in self._start)

    @property
    def _buffers(self) -> list[Tensor]:
        """Asked anew each time: a forward pass may put another tensor in a buffer's place."""
        return [owner.get_buffer(attribute) for owner, attribute in self._places]

    def rewind(self) -> None:
        """Put back the values of the step's beginning, before a micro-batch's forward pass."""
        for buffer, start in zip(self._buffers, self._start, strict=True):
            buffer.copy_(start)

    def seen(self) -> Tensor:
        """What a micro-batch left, (n,): floats as they are, whole numbers as their advance."""
        parts = [
            (buffer if buffer.is_floating_point() else buffer.long() - start.long()).detach().reshape(-1).to(self._like.dtype)
            for buffer, start in zip(self._buffers, self._start, strict=True)
        ]
        return torch.cat(parts) if parts else self._like.new_empty(0, requires_grad=False)

    def settle(self, total: Tensor, micro_batches: float) -> None:
        """End the step: `total` is the sum of `seen` over all micro-batches of all ranks, (n,)."""
        if not self.size or not micro_batches:
            return
        sizes = [start.numel() for start in self._start]
        for buffer, start, part in zip(self._buffers, self._start, torch.split(total / micro_batches, sizes), strict=True):
            mean = part.view(buffer.shape)
            start.copy_(
                mean if buffer.is_floating_point() else start.long() + mean.round().long()
            )  # copy_ brings it back to the buffer's type
            buffer.copy_(start)

    def note_start(self) -> None:
        """Take the present values for the step's beginning: after a state was loaded."""
        for buffer, start in zip(self._buffers, self._start, strict=True):
            start.copy_(buffer)
