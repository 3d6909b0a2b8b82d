"""How much of each state is in use, what sets it, and what is lost when the rest is cut: the state-rank study, repeated.

    python -m experiments.state_rank.run                                   the control, three minutes on 2 CPU cores
    python -m experiments.state_rank.run Qwen/Qwen3.5-0.8B --dtype bfloat16 --documents a.txt ... --max-tokens 16384 \\
        --published qwen3.5-0.8b                                           the study itself, one GPU, about ten minutes
    python -m experiments.state_rank.run full --max-tokens 640             random weights of the 0.8B size, a dry run

Measures spectra, horizons and keys, reads, and the loss at several ranks, each in a results folder of its own; writes one
report.html; and prints the acceptance sheet (:mod:`experiments.state_rank.sheet`): each number of the study as published
and as measured, and with ``--published`` whether they agree. Expected: for a small control the shape of the study (ranks
grow with the horizon and level off) and not its numbers; random weights have neither.
"""

import argparse
from pathlib import Path

import numpy as np

import jaxdelta as jd
from experiments.state_rank.sheet import PUBLISHED, lines, measured, sheet
from jaxdelta.cli.arguments import ranks
from jaxdelta.documents import Document, embedded_texts, read_documents, tokenize
from jaxdelta.report.page import report
from jaxdelta.report.terminal import Terminal
from jaxdelta.results.folder import write_tables
from ports.qwen3_5.full_size import random_model

FOLDER = Path("results") / "state_rank"
ANALYSES = ("spectrum", "keys", "reads", "sweep")


def main() -> None:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("model", nargs="?", default="control", help="embedded model, folder, hub id, or full")
    top.add_argument("--documents", nargs="+", type=Path, metavar="FILE", help="default: the embedded ones")
    top.add_argument("--max-tokens", type=int, default=16384)
    top.add_argument("--segment", type=int, default=256)
    top.add_argument("--ranks", type=ranks, help="default: 1, 2, 4, 8, 12, 16, 32, 64 below min(K, V)")
    top.add_argument("--dtype", default="float32")
    top.add_argument("--published", choices=PUBLISHED, help="whose numbers to hold the measured ones against")
    top.add_argument("--out", type=Path)
    arguments = top.parse_args()
    out = arguments.out or FOLDER / Path(arguments.model).name

    model = random_model(arguments.dtype) if arguments.model == "full" else jd.load(arguments.model, dtype=arguments.dtype)
    documents = [d.head(arguments.max_tokens) for d in documents_of(arguments, model)]
    run(model, documents, out, name=arguments.model, segment=arguments.segment, ranks=arguments.ranks)
    report([out / name for name in ANALYSES], out / "report.html")
    found = lines(measured(out), arguments.published)
    write_tables(found, out, "sheet")
    console = Terminal()
    console.print(sheet(found))
    console.written(out, [*ANALYSES, "report.html", "sheet.parquet", "sheet.csv"])


def documents_of(arguments: argparse.Namespace, model: jd.Decoder) -> list[Document]:
    """The given documents; of a model without a tokenizer two of random ids."""
    if arguments.documents or model.tokenizer is not None:
        given = read_documents(arguments.documents) if arguments.documents else embedded_texts()
        return tokenize(given, model.tokenizer, vocab_size=model.config.vocab_size)
    rng = np.random.default_rng(0)
    size = model.config.vocab_size
    return [Document(f"random ids {i}", rng.integers(0, size, arguments.max_tokens)) for i in range(2)]


def run(model: jd.Decoder, documents, out: Path, *, name: str, segment: int = 256, ranks: list[int] | None = None) -> None:
    """All analyses, each continued where it was killed."""
    kept = ranks or [r for r in (1, 2, 4, 8, 12, 16, 32, 64) if r < model.config.max_rank]
    options = dict(segment=segment, name=name)
    jd.spectrum(model, documents, out=out / "spectrum", **options)
    jd.keys(model, documents, out=out / "keys", **options)
    jd.state_reads(model, documents, out=out / "reads", **options)
    jd.sweep(model, documents, ranks=kept, out=out / "sweep", **options)


if __name__ == "__main__":
    main()
