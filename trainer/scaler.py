"""Loss scaling for float16, decided from numbers that are the same on every rank, so that all skip an update or none does. Torch-free.

torch.amp.GradScaler looks at each rank's own gradients before or after they are added, which differ when parameters are sharded.
"""

import math
from dataclasses import dataclass
from typing import Any

GROWTH, BACKOFF, CALM_STEPS = 2.0, 0.5, 2000  # torch.amp.GradScaler's defaults
SMALLEST = 2.0**-14  # float16's smallest normal number: below it the fault is elsewhere
LARGEST = 2.0**24  # beyond it nothing is gained, and sums of scaled float32 gradients might overflow


@dataclass(slots=True)
class LossScaler:
    """The factor of the loss; 1 and never changed when the recipe asks for none."""

    scale: float = 1.0
    calm: int = 0  # updates since the last overflow or growth
    active: bool = False

    @classmethod
    def starting_at(cls, first: float | None) -> "LossScaler":
        """A scaler that starts at `first`; None = no scaling."""
        return cls() if first is None else cls(scale=float(first), active=True)

    def absorbs(self, norm: float) -> bool:
        """True when a gradient norm that is not finite is the scale's doing: the update is skipped and a smaller scale tried."""
        return self.active and not math.isfinite(norm) and self.scale > SMALLEST

    def note(self, *, overflowed: bool) -> None:
        """Shrink after an overflow (that update was skipped), grow after CALM_STEPS updates without one."""
        if not self.active:
            return
        self.calm = 0 if overflowed else self.calm + 1
        if overflowed:
            self.scale *= BACKOFF
        elif self.calm == CALM_STEPS:
            self.scale, self.calm = min(self.scale * GROWTH, LARGEST), 0

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"scale": self.scale, "calm": self.calm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.scale, self.calm = float(state["scale"]), int(state["calm"])
