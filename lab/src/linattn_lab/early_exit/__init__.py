"""Early exit: every example leaves the network at the first confident classifier."""

from .rules import Confidence, Entropy, Patience, decide
from .wrapper import EarlyExit, Prediction, weighted_loss

__all__ = ["Confidence", "EarlyExit", "Entropy", "Patience", "Prediction", "decide", "weighted_loss"]
