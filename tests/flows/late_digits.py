"""The example recipe with a column that only exists once a clerk has read the scan: its data contract has to fail."""

from digits import Digits, DigitsRecipe


class LateDigits(DigitsRecipe):
    """Digits whose frames hold an answer from after the cutoff."""

    def data(self, split: str) -> Digits:
        loaded = super().data(split)
        loaded.frame = loaded.frame.assign(clerk_reading=loaded.frame["digit"])
        return loaded


recipe = LateDigits()
