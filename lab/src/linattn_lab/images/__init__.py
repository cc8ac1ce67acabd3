"""Classifying images: ResNet-18, data with and without ground truth, and training, for the labs on difficulty."""

from .datasets import ImageSet, Part, load
from .resnet import ResNet18
from .shapes import SHAPE_CLASSES, Shapes, generate
from .training import accuracy, load_model, new_model, save_model, scores, train

__all__ = [
    "SHAPE_CLASSES",
    "ImageSet",
    "Part",
    "ResNet18",
    "Shapes",
    "accuracy",
    "generate",
    "load",
    "load_model",
    "new_model",
    "save_model",
    "scores",
    "train",
]
