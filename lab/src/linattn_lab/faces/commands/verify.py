"""linattn lab faces verify: whether two images show the same person."""

import argparse
from pathlib import Path

from ...commandline import add_output, describe, require, write_json
from .gallery import add_model, add_threshold, load_embedder

HELP = """
Tells whether two images show the same person: the squared distance of their embeddings against the model's threshold (0 the
same image, 2 unrelated, 4 opposite), and how sure that is by the pairs of people that training held out, or of those that
`linattn lab faces pairs PHOTOS --keep` has put into the model.

examples:
  linattn lab faces verify a.jpg b.jpg
  linattn lab faces verify a.jpg b.jpg --exit-code && echo "one person"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    parser.add_argument("first", metavar="PICTURE", type=Path, help="a picture of one face")
    parser.add_argument("second", metavar="PICTURE", type=Path, help="another one")
    add_model(parser)
    add_threshold(parser)
    parser.add_argument("--exit-code", action="store_true", help="exit with 1 for different people")
    add_output(parser, "--json", "write the answer for machines")


def run(args: argparse.Namespace) -> int:
    require("PIL", "safetensors")
    import torch

    from ..index.add_folder import read_picture
    from ..index.search import squared_distances
    from ..verification.confidence import Sureness

    embedder = load_embedder(args.model)
    pictures = torch.cat([read_picture(path, embedder) for path in (args.first, args.second)])
    first, second = embedder.embed_tensor(pictures).numpy()
    distance = float(squared_distances(first[None], second[None])[0, 0])
    threshold = embedder.threshold if args.threshold is None else args.threshold
    same = distance <= threshold
    answer = {"same": same, "distance": distance, "threshold": threshold}
    print("one person" if same else "different people")
    print(f"squared distance {distance:.3f}, threshold {threshold:.3f}")
    calibration = embedder.about.get("calibration")
    if calibration is None:
        print(
            "how sure: the model keeps no distances of people it has not seen; "
            f"`linattn lab faces pairs PHOTOS --model {args.model} --keep` adds them"
        )
    else:
        sure = Sureness.of(distance, calibration)
        answer |= {"probability_same": sure.probability, "missed": sure.missed, "mistaken": sure.mistaken}
        print(f"how sure: {_percent(max(sure.probability, 1 - sure.probability))}{_doubt(sure.probability, same)}")
        print(
            f"  of pairs of one person {_percent(sure.missed)} are farther apart, "
            f"of pairs of different people {_percent(sure.mistaken)} are as near "
            f"({calibration['pairs'][0]} and {calibration['pairs'][1]} pairs)"
        )
    if args.json:
        write_json(args.json, answer)
        print(f"wrote {args.json}")
    return 1 if args.exit_code and not same else 0


def _doubt(probability: float, same: bool) -> str:
    """A threshold set for few mistakes may say "different" where one person is the likelier answer, and the reverse."""
    likely = probability >= 0.5
    verdict = "one person" if likely else "different people"
    if likely == same:
        return f" that it is {verdict}, if both were equally likely before"
    return f" that it is {verdict}, if both were equally likely before; the threshold asks for more"


def _percent(share: float) -> str:
    if 0 < share < 0.001:
        return "less than 0.1 %"
    if 0.999 < share < 1:
        return "more than 99.9 %"
    return f"{100 * share:.1f} %"
