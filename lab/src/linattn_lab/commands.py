"""The tree of `linattn lab` commands. Imports nothing slow: the command line loads it for --help."""

from linattn.cli.commands import Command

FACES = {
    "train": Command("learn an embedding from a folder of people, one folder each", "linattn_lab.faces.commands.train"),
    "report": Command(
        "verify unseen people, compared with Fisherfaces; ablations", "linattn_lab.faces.commands.report"
    ),
    "unseen": Command(
        "the threshold and the clusters of `train` on people it has not seen", "linattn_lab.faces.commands.unseen"
    ),
    "orl": Command("write the ORL faces as a folder of person/image files", "linattn_lab.faces.commands.orl"),
    "embed": Command("add the faces of a folder to an index", "linattn_lab.faces.commands.embed"),
    "verify": Command("tell whether two images show the same person", "linattn_lab.faces.commands.verify"),
    "search": Command("find the faces in an index that are nearest to an image", "linattn_lab.faces.commands.search"),
    "cluster": Command("group images by person: contact sheet and page", "linattn_lab.faces.commands.cluster"),
    "pairs": Command("show the pairs closest to the threshold", "linattn_lab.faces.commands.pairs"),
}
FACES_EXAMPLES = """the whole path on the ORL faces:
  linattn lab faces orl orl-train --people 1-30    # a folder for each person, as your own pictures should be
  linattn lab faces orl orl-new --people 31-40     # people the model will not have seen
  linattn lab faces train orl-train                # writes faces-model
  linattn lab faces pairs orl-new                  # where the threshold stands: pairs.html
  linattn lab faces embed orl-new                  # writes faces-index
  linattn lab faces verify orl-new/s35/06.png orl-new/s35/07.png
  linattn lab faces search orl-new/s35/07.png
  linattn lab faces cluster                        # clusters.png, clusters.html"""
EARLY_EXIT = {
    "train": Command("train a network with exits", "linattn_lab.early_exit.commands.train"),
    "sweep": Command("choose the tolerance for an accuracy or a budget", "linattn_lab.early_exit.commands.sweep"),
    "report": Command("train, measure and write one page of results", "linattn_lab.early_exit.commands.report"),
    "predict": Command("classify image files: class, exit, confidence", "linattn_lab.early_exit.commands.predict"),
    "seeds": Command(
        "train anew with several seeds and threads; bars and intervals", "linattn_lab.early_exit.commands.seeds"
    ),
}
EARLY_EXIT_EXAMPLES = """examples:
  linattn lab early-exit train                     # shapes in noise; writes early-exit
  linattn lab early-exit sweep --floor 0.9         # the tolerance for an accuracy of 0.9
  linattn lab early-exit predict picture.png"""
DIFFICULTY = {
    "train": Command("train the networks to be measured", "linattn_lab.difficulty.commands.train"),
    "measure": Command("measure the prediction depth of every image", "linattn_lab.difficulty.commands.measure"),
    "report": Command("train, measure and write one page of results", "linattn_lab.difficulty.commands.report"),
}
DIFFICULTY_EXAMPLES = """examples:
  linattn lab difficulty train                     # shapes in noise; writes difficulty-shapes
  linattn lab difficulty measure
  linattn lab difficulty report --json depth.json"""
SUMMARIZE = {
    "prepare": Command(
        "make training pairs: Debian's descriptions, or your own", "linattn_lab.summarize.commands.prepare"
    ),
    "train": Command("train a model on prepared pairs", "linattn_lab.summarize.commands.train"),
    "evaluate": Command(
        "score a model by ROUGE, compared with simple baselines", "linattn_lab.summarize.commands.evaluate"
    ),
    "compare": Command("compare models that differ in their kernel", "linattn_lab.summarize.commands.compare"),
    "run": Command("summarize your documents, one line each", "linattn_lab.summarize.commands.run"),
}
SUMMARIZE_EXAMPLES = """examples:
  linattn lab summarize run README.md              # with the included weights
  linattn lab summarize prepare && linattn lab summarize train --out mine
  linattn lab summarize evaluate --model mine"""
LAB_COMMANDS = {
    "handmade": Command(
        "transformers with weights set by hand, next to trained ones", "linattn_lab.handmade.commands.handmade"
    ),
    "questions": Command(
        "five questions about attention: theory and measurement", "linattn_lab.questions.commands.questions"
    ),
    "purify": Command(
        "linear denoising of images, compared with truncated PCA", "linattn_lab.purification.commands.purify"
    ),
    "summarize": Command(
        "summarize documents of any length in one line", commands=SUMMARIZE, examples=SUMMARIZE_EXAMPLES
    ),
    "early-exit": Command(
        "a network in which each image exits at the first confident classifier",
        commands=EARLY_EXIT,
        examples=EARLY_EXIT_EXAMPLES,
    ),
    "difficulty": Command(
        "prediction depth: how deep into a network the class of an image is settled",
        commands=DIFFICULTY,
        examples=DIFFICULTY_EXAMPLES,
    ),
    "figures": Command(
        "run the commands behind the docs' figures anew: what moved", "linattn_lab.figures.commands.figures"
    ),
    "faces": Command("FaceNet on your own folders of people", commands=FACES, examples=FACES_EXAMPLES),
}
LAB_EXAMPLES = """examples:
  linattn lab questions --quick                    # no data needed, some seconds
  linattn lab summarize run README.md
  linattn lab faces --help                         # options and examples"""
LAB = Command("the companion systems", commands=LAB_COMMANDS, examples=LAB_EXAMPLES)
