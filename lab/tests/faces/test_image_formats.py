"""Images of any format, size and state."""

import numpy as np
import pytest
from PIL import Image

from face_files import picture
from linattn_lab.faces.embedder import Embedder
from linattn_lab.faces.index import FaceIndex
from linattn_lab.faces.index.add_folder import add_folder


class TestFormats:
    def embedding_of(self, path, model):
        return Embedder.load(model).embed([path])[0].numpy()

    @pytest.mark.parametrize(
        ("name", "mode", "options"),
        [
            ("a.png", "L", {}),
            ("a.png", "RGB", {}),
            ("a.jpg", "L", {"quality": 95}),
            ("a.jpg", "CMYK", {"quality": 95}),
            ("a.bmp", "RGB", {}),
            ("a.webp", "RGB", {"lossless": True}),
            ("a.gif", "L", {}),
            ("a.tif", "L", {}),
            ("a.png", "P", {"transparency": 0}),
            ("a.png", "I;16", {}),
            ("A.PNG", "RGBA", {}),
            ("a.png", "1", {}),
        ],
    )
    def test_a_picture_is_the_same_face_in_every_format(self, name, mode, options, tmp_path, model):
        plain = picture(3)
        plain.save(tmp_path / "plain.png")
        if mode == "I;16":
            image = Image.fromarray(np.asarray(plain).astype(np.uint16) * 257)
        elif mode == "P":  # colour 0 is used nowhere, and transparent
            grey = np.asarray(plain).clip(1)
            image = Image.frombytes("P", plain.size, grey.tobytes())
            image.putpalette([v for i in range(256) for v in (i, i, i)])
        else:
            image = plain.convert(mode)
        (tmp_path / "other").mkdir()
        image.save(tmp_path / "other" / name, **options)
        picture(4).save(tmp_path / "stranger.png")
        own, same, stranger = (
            self.embedding_of(tmp_path / part, model) for part in ("plain.png", f"other/{name}", "stranger.png")
        )
        # Black and white alone is another picture; it must be read, not be equal.
        allowed = 4 if mode == "1" else 0.05 * ((own - stranger) ** 2).sum()
        assert ((own - same) ** 2).sum() < allowed

    def test_exif_rotation_is_undone(self, tmp_path, model):
        upright = picture(4)
        upright.save(tmp_path / "upright.png")
        exif = Image.Exif()
        exif[0x0112] = 6  # to be turned by 90 degrees clockwise
        upright.rotate(90, expand=True).save(tmp_path / "lying.jpg", exif=exif, quality=98)
        upright.rotate(90, expand=True).save(tmp_path / "as-it-lies.jpg", quality=98)
        own, same, lying = (
            self.embedding_of(tmp_path / part, model) for part in ("upright.png", "lying.jpg", "as-it-lies.jpg")
        )
        assert ((own - same) ** 2).sum() < 0.05 * ((own - lying) ** 2).sum()

    @pytest.mark.parametrize("size", [(1, 1), (3, 500), (2000, 30), (1500, 1800)])
    def test_any_size(self, size, tmp_path, model):
        picture(1, size).save(tmp_path / "a.png")
        assert np.isfinite(self.embedding_of(tmp_path / "a.png", model)).all()

    def test_damaged_pictures_are_named_and_never_end_a_run(self, tmp_path, model):
        """Pictures of all formats with bytes changed at random: read or skipped, nothing else."""
        rng = np.random.default_rng(0)
        (tmp_path / "photos").mkdir()
        for suffix in ("png", "jpg", "bmp", "webp", "gif", "tif", "dds"):
            picture(2).convert("RGB" if suffix == "dds" else "L").save(tmp_path / f"whole.{suffix}")
            data = (tmp_path / f"whole.{suffix}").read_bytes()
            for i in range(25):
                wrong = bytearray(data[: int(rng.integers(1, len(data) + 1))])
                for place in rng.integers(0, len(wrong), 6):
                    wrong[place] = int(rng.integers(0, 256))
                (tmp_path / "photos" / f"{i}.{suffix}").write_bytes(bytes(wrong))
        index = FaceIndex.create(tmp_path / "index", 128)
        tally = add_folder(index, tmp_path / "photos", Embedder.load(model))
        assert tally.added + tally.known + len(tally.broken) == 175
        assert len(tally.broken) > 50
        assert np.isfinite(index.embeddings()).all()
