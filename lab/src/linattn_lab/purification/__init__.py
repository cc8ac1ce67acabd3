"""Linear purification: the ridge map of data onto itself, in scikit-learn's convention, and what it does to noise."""

from .denoise import Result, add_noise, denoise, psnr, sweep_lambda, sweep_rank
from .gradient_descent import loss
from .purifier import LinearPurifier

__all__ = ["LinearPurifier", "Result", "add_noise", "denoise", "loss", "psnr", "sweep_lambda", "sweep_rank"]
