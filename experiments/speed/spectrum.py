"""What do the measures of states cost beside the run that they watch?

    python -m experiments.speed.spectrum                    control, one document of 16,384 tokens; minutes on 2 cores

Times in turn a segmented run without observers, the same with spectra at the default places, with keys, and with reads, and
prints ratios. Expected: a place of spectra adds about 1 %; each analysis of the document takes less than a minute.
"""

import argparse
import time

import jax
import numpy as np

import jaxdelta as jd
from jaxdelta.analysis.spectrum import states_of
from jaxdelta.documents import Document
from jaxdelta.results.documents import as_documents


def main() -> None:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--model", default="control")
    top.add_argument("--tokens", type=int, default=16384)
    top.add_argument("--segment", type=int, default=256)
    top.add_argument("--repeats", type=int, default=5)
    arguments = top.parse_args()

    model = jd.load(arguments.model)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, arguments.tokens)
    (document,) = as_documents([Document("random", ids)], model)
    options = dict(segment=arguments.segment)
    calls = {
        "run": lambda: [S for _, S in states_of(model, document, arguments.segment, arguments.tokens)][
            -1
        ].block_until_ready(),
        "spectrum": lambda: jd.spectrum(model, [document], **options),
        "keys": lambda: jd.keys(model, [document], **options),
        "reads": lambda: jd.state_reads(model, [document], **options),
    }
    for call in calls.values():
        call()
    seconds = {name: [] for name in calls}
    for _ in range(arguments.repeats):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {arguments.model}, {arguments.tokens:,} tokens")
    run = np.array(seconds["run"])
    for name, taken in seconds.items():
        ratio = np.array(taken) / run
        print(f"{name}: {np.median(taken):.2f} s, {np.median(ratio):.2f} runs ({ratio.min():.2f} to {ratio.max():.2f})")


if __name__ == "__main__":
    main()
