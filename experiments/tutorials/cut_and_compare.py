# %% [markdown]
# # Cut and compare
#
# What does a model lose when every state keeps r directions, and is that more than it would lose to other changes of the
# same kind? Opens as a notebook; `python -m experiments.tutorials.cut_and_compare` runs it, in half a minute on 2 cores.

# %%
import jaxdelta as jd
from jaxdelta.analysis.compare import differences
from jaxdelta.analysis.sweep import summarize
from jaxdelta.documents import embedded_texts, tokenize

model = jd.load("control")  # or a folder, or a hub id
documents = [d.head(1300) for d in tokenize(embedded_texts(), model.tokenizer)]
print(f"{len(documents)} documents, {len(model.config.heads)} heads of {model.config.key_dim} x {model.config.value_dim}")

# %% [markdown]
# At every boundary of 256 tokens each state keeps its leading directions, and the next segment reads what is left. All
# ranks run as rows of one batch.

# %%
rows = jd.sweep(model, documents, ranks=(1, 2, 4, 8))
for s in summarize(rows):
    print(f"rank {s.world.rank:2}: loss {s.loss:.4f}, {s.difference:+.4f} ± {s.stderr:.4f} ({s.percent:+.2f} %)")

# %% [markdown]
# Is it the directions that count, or any state of that spectrum? Noise keeps each state's singular values and replaces its
# singular vectors; `Zero` is the floor. Interventions may be combined.

# %%
rows = jd.compare(
    model,
    documents,
    {
        "rank 4": jd.Truncate(4),
        "noise of the same spectrum": jd.Noise(),
        "rank 4, then 8 bits": jd.Sequential([jd.Truncate(4), jd.Quantise(8)]),
        "empty": jd.Zero(),
    },
)
for s in differences(rows):
    print(f"{s.world[0]:>28}: {s.difference:+.4f} ± {s.stderr:.4f}")

# %% [markdown]
# The same cut, one layer at a time, says where the loss comes from.

# %%
rows = jd.sweep(model, documents, ranks=(1,), scope="layer")
for s in sorted(summarize(rows)[1:], key=lambda s: -s.difference):
    print(f"layer {s.world.layer} at rank 1: {s.difference:+.5f} ± {s.stderr:.5f}")
