# %% [markdown]
# # Your own intervention, and your own loss
#
# An intervention is a small frozen dataclass; a loss is a function of logits. Nothing in the library needs to know either.

# %%
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import jaxdelta as jd
from jaxdelta.analysis.compare import differences
from jaxdelta.documents import embedded_texts, tokenize

model = jd.load("control")
documents = [d.head(900) for d in tokenize(embedded_texts(), model.tokenizer)][:3]

# %% [markdown]
# This one shrinks every state towards zero, more strongly where it is large: a soft cap on its norm. States come stacked,
# [L, B, H, K, V]; what `change` returns replaces them.


# %%
@dataclass(frozen=True)
class SoftCap(jd.Perturbation):
    """S <- cap tanh(||S|| / cap) S / ||S||."""

    cap: float

    def change(self, S, own, index):
        norm = jnp.linalg.norm(S, axis=(-2, -1), keepdims=True)
        return S * jnp.where(norm > 0, self.cap * jnp.tanh(norm / self.cap) / jnp.where(norm > 0, norm, 1), 1), own


rows = jd.compare(model, documents, {f"cap {c:g}": SoftCap(c) for c in (1.0, 4.0, 16.0)})
for s in differences(rows):
    print(f"{s.world[0]:>10}: {s.difference:+.4f} ± {s.stderr:.4f}")

# %% [markdown]
# The loss: minus the log-probability of a given answer after a text. `jd.OfLogits` differentiates any function of logits;
# its derivatives for every state, write strength and decay come from one backward pass.

# %%
text = documents[0].tokens[:641]  # the last token is the answer


def minus_log_probability(logits, targets):
    """Of the token that follows each token, Float[B T]."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), targets[..., None], axis=-1)[..., 0]


scored = np.zeros(len(text) - 1, bool)
scored[-1] = True  # the answer alone
answer = jd.OfLogits(minus_log_probability, "minus log-probability of the answer", "nats")
maps = jd.sensitivity(model, text, loss=answer, scored=scored, samples=0)
print(f"minus log-probability of the answer: {maps.loss.item():.3f} nats")
state = abs(maps.head_state.isel(document=0))
place = state.where(state == state.max(), drop=True)
layer, head, boundary = (int(place[name].item()) for name in ("layer", "head", "boundary"))
print(f"most sensitive state: layer {layer}, head {head}, at {boundary} tokens")

# %% [markdown]
# A derivative can be checked by hand. Here the write strength of one token is pushed up and down by a public edit.

# %%
beta = maps.beta_sensitivity.isel(document=0).sel(layer=layer, head=head)
token = int(np.argmax(np.abs(beta.values)))
push, step = np.eye(model.config.num_value_heads, dtype=np.float32)[head], 1e-2


def loss_with(amount: float) -> float:
    """The answer's loss with one write strength changed."""
    edit = jd.Edit("beta", jd.added_at, layer, (token, amount * push))
    return float(jd.run(model, text[None], edits=(edit,)).losses[0, -1])


by_hand = (loss_with(step) - loss_with(-step)) / (2 * step)
print(f"dL/dbeta of token {token}: {beta.values[token]:+.4f} by the backward pass, {by_hand:+.4f} by hand")
assert abs(by_hand - beta.values[token]) < 0.1 * abs(by_hand) + 1e-3
