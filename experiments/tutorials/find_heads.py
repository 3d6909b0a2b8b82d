# %% [markdown]
# # Find the heads that matter, and check it
#
# One backward pass estimates what every head's output and state is worth. An estimate is worth what a measurement says:
# here every head is removed for real, on the same tokens.

# %%
import numpy as np

import jaxdelta as jd
from jaxdelta.documents import embedded_texts, tokenize
from jaxdelta.metrics import spearman

model = jd.load("control")
(tokens,) = [d.tokens[:769] for d in tokenize(embedded_texts(), model.tokenizer)][:1]

# %% [markdown]
# `sensitivity` gives derivatives of the loss for gates on directions, heads, write strengths and decays. `head_importance`
# adds them up: the estimated rise of the loss when a head's output is removed is first order plus half the Fisher part.

# %%
maps = jd.sensitivity(model, tokens, samples=8)
estimated = jd.head_importance(maps).head_output.isel(document=0)
ranking = sorted(
    ((float(x), int(x.layer), int(x["head"])) for x in estimated.stack(place=("layer", "head")).T), reverse=True
)
for value, layer, head in ranking[:5]:
    print(f"layer {layer} head {head}: estimated {value:+.4f} nats a token")

# %% [markdown]
# The measurement: an edit multiplies a head's output by zero, in every segment.

# %%
H = model.config.num_value_heads
base = jd.run(model, tokens[None]).losses[0].mean()
measured = []
for _, layer, head in ranking:
    mask = (np.arange(H) != head).astype(np.float32)[:, None]
    edit = jd.Edit("head_output", jd.multiplied, layer, mask)
    measured.append(float(jd.run(model, tokens[None], edits=(edit,)).losses[0].mean() - base))
agreement = spearman(np.array([value for value, *_ in ranking]), np.array(measured))
print(f"Spearman of estimate and measurement over {len(ranking)} heads: {agreement:.2f}")
for (value, layer, head), effect in list(zip(ranking, measured, strict=True))[:5]:
    print(f"layer {layer} head {head}: estimated {value:+.4f}, measured {effect:+.4f}")

# %% [markdown]
# Why does a head matter? Its horizon and what is read of its state say which kind it is.

# %%
texts = {"text": tokens}
keys, reads = jd.keys(model, texts), jd.state_reads(model, texts)
for _, layer, head in ranking[:3]:
    here = keys.isel(document=0).sel(layer=layer, head=head)
    carried = reads["carried"].isel(document=0).sel(layer=layer, head=head).median().item()
    print(
        f"layer {layer} head {head}: forgets in {here.horizon.item():.0f} tokens, effective rank "
        f"{here.effective_rank.item():.1f}, energy read of the carried state over that of the output {carried:.2f}"
    )
