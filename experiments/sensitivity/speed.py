"""What does a sensitivity map cost, in time and in memory?

    python -m experiments.sensitivity.speed                               control model, 2,048 tokens
    python -m experiments.sensitivity.speed --model full --segments 4     random weights of the 0.8B size, float32

Times a segmented run, a first-order map and a map with Fisher samples in turn on the same tokens, and prints their ratios.
Expected: a map costs at most 4 runs, each sample at most 3.5. Then measures peak memory for maps of 2, 4, 8, 16 segments,
each in its own process, with the cache of 16 segments and so with the same compiled programs. Expected: memory grows only
by the carries of the boundaries and by the maps.
"""

import argparse
import os
import subprocess
import sys
import time

import jax
import numpy as np

import jaxdelta as jd
from jaxdelta.analysis.sensitivity.maps import sensitivity
from jaxdelta.runs.capacity import gib, reverse_memory
from ports.memory import peak_bytes
from ports.qwen3_5.full_size import random_model


def load(name: str, dtype: str) -> jd.Decoder:
    """The model, by name; ``full`` is the 0.8B size with random weights."""
    return random_model(dtype) if name == "full" else jd.load(name, dtype=dtype)


def seconds(call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def time_ratios(model: jd.Decoder, tokens: np.ndarray, samples: int, repeats: int) -> None:
    """Print the cost of maps relative to a run, and what one map replaces."""
    calls = [
        lambda: jd.run(model, tokens[None]),
        lambda: sensitivity(model, tokens, samples=0),
        lambda: sensitivity(model, tokens, samples=samples),
    ]
    first = [seconds(call) for call in calls]
    rows = np.array([[seconds(call) for call in calls] for _ in range(repeats)])
    run, whole, sampled = np.median(rows, axis=0)
    ratio, sample = rows[:, 1] / rows[:, 0], (rows[:, 2] - rows[:, 1]) / samples / rows[:, 0]
    print(f"with compilation: run {first[0]:.1f} s, map {first[1]:.1f} s, map with {samples} samples {first[2]:.1f} s")
    print(f"run {run:.3f} s, map {whole:.3f} s, map with {samples} samples {sampled:.3f} s")
    print(f"map / run: median {np.median(ratio):.2f}, {ratio.min():.2f} to {ratio.max():.2f}")
    print(f"Fisher sample / run: median {np.median(sample):.2f}, {sample.min():.2f} to {sample.max():.2f}")
    c = model.config
    heads, boundaries = len(c.linear_layers) * c.num_value_heads, (len(tokens) - 1) // 256
    directions = boundaries * heads * c.max_rank
    gates = len(tokens) * heads * (1 + c.num_householder)
    print(f"{directions + gates:,} derivatives in a map, {(directions + gates) / whole:,.0f} a second")
    times = directions * run / 2 / whole
    print(f"ablating its {directions:,} directions one by one, half a run each: {times:,.0f} times a map")


def peak(arguments: argparse.Namespace, segments: int) -> int:
    """Peak resident memory, in bytes, of a process that makes one map of this many segments."""
    command = [sys.executable, "-m", "experiments.sensitivity.speed", "--child", str(segments)]
    command += ["--model", arguments.model, "--dtype", arguments.dtype, "--memory", *map(str, arguments.memory)]
    # An allocator that keeps freed memory blurs the peak by tens of MiB.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.split()[-1])


def child(arguments: argparse.Namespace) -> None:
    model = load(arguments.model, arguments.dtype)
    sensitivity(model, random_tokens(model, arguments.child * 256), samples=0, max_length=256 * max(arguments.memory))
    print(peak_bytes())


def random_tokens(model: jd.Decoder, count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, model.config.vocab_size, count)


def main() -> None:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--model", default="control")
    top.add_argument("--dtype", default="float32")
    top.add_argument("--segments", type=int, default=8)
    top.add_argument("--samples", type=int, default=4, help="of the Fisher part; default: 4")
    top.add_argument("--repeats", type=int, default=5)
    top.add_argument("--memory", type=int, nargs="*", default=(2, 4, 8, 16), help="segments to measure peak memory at")
    top.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = top.parse_args()
    if arguments.child:
        return child(arguments)
    model = load(arguments.model, arguments.dtype)
    print(
        f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {arguments.model}, {arguments.dtype}, 256-token segments"
    )
    time_ratios(model, random_tokens(model, 256 * arguments.segments), arguments.samples, arguments.repeats)
    before = None
    for segments in arguments.memory:
        kept, rest = reverse_memory(
            model.config, dtype=arguments.dtype, segment=256, max_length=256 * segments, cotangents=1
        )
        found = peak(arguments, segments)
        grown = "" if before is None else f", {gib(found - before)} more"
        print(
            f"{segments} segments: peak {gib(found)}{grown}; estimate {gib(kept + rest)}, boundaries' carries {gib(kept)}"
        )
        before = found


if __name__ == "__main__":
    main()
