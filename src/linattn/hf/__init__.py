"""Hugging Face: linear-time attention inside pretrained models, without training them."""

try:
    import transformers
except ImportError as error:
    raise ImportError("linattn.hf needs transformers 5: pip install 'linattn[hf]'.") from error

if int(transformers.__version__.split(".")[0]) < 5:
    raise ImportError(f"linattn.hf needs transformers 5, found {transformers.__version__}: pip install 'linattn[hf]'.")

from . import weights
from .attach import attach, detach
from .budgets import Calibration
from .cache import StateCache
from .calibrate import calibrate
from .describe import Description, describe

__all__ = ["Calibration", "Description", "StateCache", "attach", "calibrate", "describe", "detach", "weights"]
