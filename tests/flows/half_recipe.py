"""A recipe that misses members."""


class Half:
    """Only a name."""

    name = "half"


recipe = Half()
