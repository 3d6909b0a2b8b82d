"""How fast is a segment of the full-size model against transformers' torch path on the same CPU?

Command: ``python -m experiments.speed.segments [--reference-python PYTHON]``
Wall time: about 4 minutes on 2 cores, 10 GiB of memory; the reference needs torch and transformers >= 5.24.
Expected: 1.1 to 1.2 times as fast, at 256 tokens, f32.

Both sides load the same random checkpoint of 752,393,024 parameters in separate processes and take turns: a segment here,
the same segment there, so that other load on the machine affects both. Each starts with an empty cache, continues the text
through it, and gives the loss of every token. The first segment of each is left out (compilation, first touch of memory).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

REFERENCE = """
import json, os, sys, time
sys.modules["fla"] = None
import numpy as np, torch, transformers
model = transformers.Qwen3_5ForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
cache = None
versions = {"torch": torch.__version__, "transformers": transformers.__version__}
print(json.dumps(versions | {"threads": torch.get_num_threads()}), flush=True)
for line in sys.stdin:
    tokens = torch.tensor([json.loads(line)])
    begun = time.perf_counter()
    with torch.no_grad():
        out = model(tokens[:, :-1], cache=cache, use_cache=True)
        losses = torch.nn.functional.cross_entropy(out.logits[0], tokens[0, 1:], reduction="none").tolist()
    cache = out.cache
    print(json.dumps({"seconds": time.perf_counter() - begun, "losses": losses}), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--segment", type=int, default=256)
    parser.add_argument("--reference-python", default=sys.executable, help="interpreter that has torch and transformers")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), arguments.segments, arguments.segment, arguments.reference_python)


def compare(folder: Path, segments: int, segment: int, python: str) -> None:
    """Time both sides in turn and print the ratio."""
    import jax
    from flax import nnx

    import jaxdelta as jd
    from jaxdelta.models.carry import split
    from jaxdelta.runs.observers import TokenLosses
    from jaxdelta.runs.segments import Part, Program, _segment
    from ports.qwen3_5.full_size import write_checkpoint

    write_checkpoint(folder)
    reference = subprocess.Popen(
        [python, "-c", REFERENCE, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    versions = json.loads(reference.stdout.readline())
    begun = time.perf_counter()
    model = jd.load(folder)
    print(f"loaded in {time.perf_counter() - begun:.1f} s; jax {jax.__version__}, {versions}, {os.cpu_count()} cores")

    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, segment * segments + 1), dtype=np.int32)
    program, params = Program(model.config, model.implementation, (TokenLosses(),), ()), nnx.state(model)
    recurrent, caches = split(jd.init_carry(model, 1, segment * segments))
    ours, theirs, worst = [], [], 0.0
    for i in range(segments):
        here = tokens[:, i * segment : (i + 1) * segment + 1]
        begun = time.perf_counter()
        part = Part(here[:, :-1], here[:, 1:], np.array([segment]))
        (found,), recurrent, caches, _ = jax.block_until_ready(_segment(program, params, recurrent, caches, part, ()))
        ours.append(time.perf_counter() - begun)
        reference.stdin.write(json.dumps(here[0].tolist()) + "\n")
        reference.stdin.flush()
        answer = json.loads(reference.stdout.readline())
        theirs.append(answer["seconds"])
        worst = max(worst, float(np.max(np.abs(np.asarray(found)[0] - answer["losses"]))))
        print(f"segment {i}: jaxdelta {ours[-1]:6.2f} s, transformers {theirs[-1]:6.2f} s", flush=True)
    reference.stdin.close()
    reference.wait()
    ratios = [b / a for a, b in zip(ours[1:], theirs[1:], strict=True)]
    print(f"first call {ours[0]:.1f} s (with compilation)")
    here, there = statistics.median(ours[1:]), statistics.median(theirs[1:])
    print(f"jaxdelta {here:.2f} s, transformers {there:.2f} s a segment (medians)")
    print(f"ratio {statistics.median(ratios):.2f} (range {min(ratios):.2f} to {max(ratios):.2f})")
    print(f"the losses of a token differ by at most {worst:.1e} nats")


if __name__ == "__main__":
    main()
