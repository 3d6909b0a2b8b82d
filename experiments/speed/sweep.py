"""How long does a sweep over long documents take with the full-size model?

Command: ``python -m experiments.speed.sweep --documents 8 --length 16384 --ranks 12 --dtype bfloat16``
Wall time: seconds on an accelerator; on 2 CPU cores ``--documents 1 --length 512 --dtype float32`` takes about a minute.
Aim on one H200 (random weights, bf16): 1.0 s for 8 documents of 16,384 tokens at r = 12 after compilation, 0.5 s for one,
12 s for 8 documents x 11 ranks. No figure has been taken on a GPU yet.

Prints the compile time of the segment function, the times of ``--repeats`` + 1 runs, and the peak memory.
"""

import argparse
import time

import jax
import numpy as np

from jaxdelta.ops.low_rank import largest_rank
from jaxdelta.runs import capacity
from jaxdelta.runs.interventions import Truncate
from jaxdelta.runs.segments import _segment, run, segment_arguments
from ports.qwen3_5.full_size import random_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--segment", type=int, default=256)
    parser.add_argument("--ranks", default="12", help="worlds of every document, e.g. 1,2,4,8,12,16,24,32,64,96,128")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    ranks = [int(r) for r in arguments.ranks.split(",")]
    model = random_model(arguments.dtype)
    rows = arguments.documents * len(ranks)
    sizes = dict(dtype=arguments.dtype, segment=arguments.segment, max_length=arguments.length)
    needed = capacity.run_memory(model.config, **sizes)
    batch = capacity.rows_that_fit(needed, rows)
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {arguments.dtype}; {rows} rows in batches of {batch}")
    rng = np.random.default_rng(0)
    documents = rng.integers(0, model.config.vocab_size, (arguments.documents, arguments.length))
    tokens = np.repeat(documents, len(ranks), axis=0)
    rank = np.tile(ranks, arguments.documents)[:, None, None]
    cuts = [slice(i, min(i + batch, rows)) for i in range(0, rows, batch)]
    begun = time.perf_counter()
    _segment.lower(*segment_arguments(model, batch, arguments.segment, arguments.length)).compile()
    print(f"segment function compiled in {time.perf_counter() - begun:.1f} s", flush=True)
    for repeat in range(arguments.repeats + 1):
        begun = time.perf_counter()
        for part in cuts:
            cut = Truncate(rank[part], max_rank=largest_rank(ranks, model.config.max_rank))
            run(model, tokens[part], segment=arguments.segment, intervention=cut)
        print(f"{'with compilation' if repeat == 0 else 'compiled'}: {time.perf_counter() - begun:.2f} s", flush=True)
    stats = jax.devices()[0].memory_stats() or {}
    peak = capacity.gib(stats["peak_bytes_in_use"]) if "peak_bytes_in_use" in stats else "not known here"
    print(f"memory: estimated {capacity.gib(needed.total(batch))}, peak {peak}")


if __name__ == "__main__":
    main()
