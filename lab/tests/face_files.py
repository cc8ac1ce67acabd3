"""Image files for tests, whole and damaged."""

import io
import struct
import zlib

import numpy as np
import torch
from PIL import Image
from torch import nn


def picture(seed=0, size=(46, 56)):
    """A blotchy grey picture, so that scaling and compression leave it recognisable."""
    small = np.random.default_rng(seed).integers(0, 256, (7, 6), np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


def broken_files(folder):
    """Files that are no pictures, each in its way; returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / "whole.jpg"
    picture(5, (400, 400)).save(whole, quality=95)
    data = whole.read_bytes()
    whole.unlink()
    texture = io.BytesIO()
    picture(5).convert("RGB").save(texture, "DDS")
    flags = bytearray(texture.getvalue())
    flags[80:84] = b"\x80\0\0\0"  # Pillow raises NotImplementedError
    header = b"\x89PNG\r\n\x1a\n"
    size = struct.pack(">IIBBBBB", 10, 10, 8, 0, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + size + struct.pack(">I", zlib.crc32(b"IHDR" + size))
    contents = {
        "truncated.jpg": data[: len(data) // 2],
        "zero.jpg": b"",
        "text.jpg": b"this is no picture\n",
        "header.png": header,
        "no-pixels.png": header + chunk,
        "tiff.tif": b"II*\x00\x08\x00\x00\x00\xff\xff",
        "gif.gif": b"GIF89a",
        "flags.dds": bytes(flags),
        "bmp.bmp": b"BM" + b"\xff" * 30,
        "webp.webp": b"RIFF\x10\x00\x00\x00WEBPVP8 ",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return sorted(contents)


def write_people(folder, people=8, each=5, size=(40, 32)):
    """Pictures of made-up people: smooth patterns, moved and noisy."""
    generator = torch.Generator().manual_seed(0)
    for person in range(people):
        (folder / f"p{person}").mkdir(parents=True)
        coarse = torch.rand(1, 1, 6, 5, generator=generator)
        for picture in range(each):
            shown = nn.functional.interpolate(coarse, size, mode="bicubic").clamp(0, 1)[0, 0]
            shown = shown.roll((picture % 3, picture % 2), (0, 1)) + 0.05 * torch.randn(size, generator=generator)
            Image.fromarray((shown.clamp(0, 1) * 255).byte().numpy()).save(folder / f"p{person}" / f"{picture}.png")
