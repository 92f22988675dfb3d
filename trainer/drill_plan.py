"""What is planned in a drill's script (trainer/drill_scripts.py), for those who judge it without torch."""

from validation.canonical import digest

PREFIX = "script:"  # of the job's recipe
STEPS, FAULT_STEP = 12, 7


def expected_digest(world_size: int) -> str:
    """The state digest of a script that ended well: in each step the ranks' numbers are added."""
    total = 0.0
    for step in range(STEPS):
        total += sum(rank + step for rank in range(world_size)) / world_size
    return digest(str(total))
