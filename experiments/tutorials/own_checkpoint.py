# %% [markdown]
# # A checkpoint of your own, verified against its torch twin
#
# A model trained elsewhere is a folder in Hugging Face's format. Before its states are studied, one question: does this
# library compute what transformers computes for it? Needs the `test` extra, and runs from a checkout
# (`python -m experiments.tutorials.own_checkpoint`).

# %%
import tempfile
from pathlib import Path

import numpy as np
from flax import nnx

import jaxdelta as jd
from ports.compare import relative_error
from ports.qwen3_5.reference import Reference

folder = Path(tempfile.mkdtemp()) / "mine"  # stands for yours: random weights in the format of the hub
config = jd.Qwen3_5Config.tiny(layer_kinds=("linear", "linear", "attention", "linear"))
jd.save(jd.Qwen3_5(config, rngs=nnx.Rngs(0)), folder)
print(sorted(file.name for file in folder.iterdir()))

# %% [markdown]
# `inspect` says what it is; `load` reads safetensors and refuses by name what it does not know.

# %%
print(jd.inspect(folder))
model = jd.load(folder)

# %% [markdown]
# The twin, on the same tokens: two segments through the cache, so that the carried state, the convolution's tail and the
# keys and values are compared as well as the logits.

# %%
tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, 150))
splits = [90, 60]
theirs, snapshots = Reference(folder).run(tokens, splits)
carry, ours = jd.init_carry(model, 1, 160), []
for begin, length in zip((0, 90), splits, strict=True):
    logits, carry = jd.forward(model, tokens[:, begin : begin + length], carry)
    ours.append(np.asarray(logits))
print(f"logits: relative error {relative_error(np.concatenate(ours, axis=1), theirs):.1e}")
linear = iter(jd.states(carry))
for layer, (snapshot, kind) in enumerate(zip(snapshots[-1], model.config.layer_kinds, strict=True)):
    if kind == "linear":
        error = relative_error(next(linear), snapshot.first)
        print(f"state of layer {layer}: relative error {error:.1e}")
        assert error < 2e-5

# %% [markdown]
# The same, with a report, gradients and every split: `python -m ports.verify FOLDER`. Then the model is one like any other.

# %%
table = jd.spectrum(model, {"random ids": tokens[0]}, segment=32, at="end")
print(table.effective_rank.isel(document=0, at=0).to_pandas().round(2))
