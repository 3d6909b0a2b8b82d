"""Which estimate of a removal's effect can be trusted, and for what?

For the embedded held-out documents: sensitivity maps of the control model, then measured removals on the same tokens, of
directions of one boundary's states (96 drawn at random, the same in every document), of every head's output and state, and
of layers. Besides first order and Fisher, the costly estimates are made for the directions.

    python -m experiments.sensitivity.run            17 minutes of CPU time; continues where it was killed
    python -m experiments.sensitivity.plot           reads only what the run wrote

Expected: of heads' outputs first order has no rank correlation with the measurement, and the default estimate 0.93 with a
sum within 5 %; directions are ranked by first order as well, but for a few strong ones that only integrated gradients get
right. The control model has 8 layers and 2 million parameters and is far from converged: at one that fits its text, first
order of directions should carry less.
"""

import argparse
from pathlib import Path

from rich.progress import Progress

import jaxdelta as jd
from jaxdelta.analysis.sensitivity import validation
from jaxdelta.analysis.sensitivity.maps import sensitivity_maps
from jaxdelta.cli.progress import follow
from jaxdelta.documents import embedded_texts, tokenize

FOLDER = Path("results") / "sensitivity"


def main() -> None:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--model", default="control")
    top.add_argument("--tokens", type=int, default=1536, help="of each document; default: 1536")
    top.add_argument("--samples", type=int, default=16)
    top.add_argument("--directions", type=int, default=96)
    top.add_argument("--steps", type=int, default=4, help="midpoints of integrated gradients; default: 4")
    top.add_argument("--out", type=Path, default=FOLDER)
    arguments = top.parse_args()

    model = jd.load(arguments.model)
    documents = [d.head(arguments.tokens) for d in tokenize(embedded_texts(), model.tokenizer)]
    maps = sensitivity_maps(model, documents, samples=arguments.samples, out=arguments.out / "maps", name=arguments.model)
    with Progress() as bar:
        validation.removals(
            model,
            documents,
            maps,
            directions=arguments.directions,
            costly_estimators=True,
            steps=arguments.steps,
            out=arguments.out / "removals",
            name=arguments.model,
            progress=follow(bar, "measuring removals", total=len(documents)),
        )


if __name__ == "__main__":
    main()
