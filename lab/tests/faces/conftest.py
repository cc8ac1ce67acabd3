"""A model that has learned nothing, and a folder of two people."""

import numpy as np
import pytest
import torch
from PIL import Image

from face_files import picture
from linattn_lab.faces.embedder import Embedder
from linattn_lab.faces.networks import NetworkSpec


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    Embedder(NetworkSpec(), threshold=0.05).save(folder)
    return folder


@pytest.fixture
def photos(tmp_path):
    """ann and bob with 4 pictures each, all of one person alike, and one of them with a broken file."""
    for number, name in enumerate(["ann", "bob"]):
        (tmp_path / "photos" / name).mkdir(parents=True)
        base = np.asarray(picture(number), np.int16)
        for i in range(4):
            noise = np.random.default_rng(10 * number + i).integers(-6, 7, base.shape)
            Image.fromarray((base + noise).clip(0, 255).astype(np.uint8)).save(tmp_path / "photos" / name / f"{i}.png")
    return tmp_path / "photos"
