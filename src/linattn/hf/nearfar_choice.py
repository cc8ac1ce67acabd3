"""Near/far as a user asks for it: by its size, or by a calibration."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from ..nearfar import NearFar
from .budgets import Calibration, compact
from .modules import Layer
from .self_calibration import LENGTH, find_or_calibrate

LONGEST = 8192  # tokens to measure on, at most: more take long


@dataclass(frozen=True)
class NearFarChoice:
    """Which near/far kernels a model gets.

    Attributes:
        window: last tokens that are exact; None for 128, or what a calibration was measured with.
        slots: of a kv head on average.
        memory: instead of slots, the size of the states of one sequence ("64MiB").
        calibration: folder of saved budgets.
        equal_slots: True gives every head the same number, and nothing is measured.
    """

    window: int | None = None
    slots: int = 128
    memory: str | None = None
    calibration: str | None = None
    equal_slots: bool = False

    def kernels(self, model: PreTrainedModel, length: int | None = None) -> NearFar | dict[Layer, NearFar]:
        """One kernel, or one for each layer, measured now if need be.

        length: tokens that will be read and written, if that is known.
        """
        if self.calibration is not None:
            return Calibration.load(self.calibration).kernels()
        plain = compact() if self.window is None else compact(self.window)
        exact = self.memory is None and length is not None and length <= plain.window + self.slots
        if self.equal_slots or exact:
            return plain.with_slots(self.slots, 0)
        size = {"mean_slots": self.slots} if self.memory is None else {"memory": self.memory}
        tokens = LENGTH
        while length is not None and tokens < min(length, LONGEST):
            tokens *= 2
        return find_or_calibrate(model, None if self.window is None else plain, length=tokens, **size).kernels()
