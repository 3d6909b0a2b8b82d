"""Run flash-linear-attention on the cases of ``fla_cases``, for tests that read what it gave.

    python -m tests.ports.fla_generate ops|layers|models FOLDER      write FOLDER/<case>.npz, and checkpoints FOLDER/<case>
    python -m tests.ports.fla_generate saved FOLDER                  run the checkpoints that lie there

A process of its own, since with fla imported transformers no longer runs its own delta rule. About a minute in all.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ports.fla.interpreter import import_fla
from ports.fla.reference import Reference, linear_snapshot
from tests.ports.fla_cases import LAYER_SEGMENTS, LAYERS, MODELS, OPS, WIDE_OPS, layer_inputs, model_inputs, op_inputs

DTYPE_OF_STORED = {"A_log": torch.float32}  # in a bf16 checkpoint


class InDouble(TorchFunctionMode):
    """Every f32 that a function asks for becomes f64: fla's naive forms cast to f32, and run in f64 line by line so."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        kwargs = {name: _widened(x) for name, x in (kwargs or {}).items()}
        return function(*map(_widened, args), **kwargs)


def _widened(x):
    return torch.float64 if x is torch.float32 else x


def generate_ops(folder: Path):
    for name, op in OPS.items():
        arrays = {k: torch.tensor(x, dtype=torch.float32) for k, x in op_inputs(op).items()}
        with torch.no_grad():
            o, S = run_op(name, op, arrays)
        np.savez(folder / f"{name}.npz", o=o.numpy(), S=S.numpy())
    torch.set_default_dtype(torch.float64)
    for name, op in WIDE_OPS.items():
        arrays = {k: torch.tensor(x, requires_grad=not k.startswith("weight")) for k, x in op_inputs(op).items()}
        with InDouble():
            o, S = run_op(name, op, arrays)
            ((o * arrays["weight_o"]).sum() + (S * arrays["weight_S"]).sum()).backward()
        gradients = {"d" + k: x.grad.numpy() for k, x in arrays.items() if x.requires_grad}
        np.savez(folder / f"{name}, f64.npz", o=o.detach().numpy(), S=S.detach().numpy(), **gradients)
    torch.set_default_dtype(torch.float32)


def run_op(name: str, op, arrays: dict):
    """o and S of the function of fla that a case is named after."""
    import fla.ops.delta_rule as delta
    import fla.ops.delta_rule.naive as delta_naive
    import fla.ops.gated_delta_product.naive as product_naive
    import fla.ops.gated_delta_rule as rule
    import fla.ops.gated_delta_rule.naive as rule_naive

    q, k, v, beta = (arrays[x] for x in ("q", "k", "v", "beta"))
    g, state = arrays.get("g"), arrays.get("state")
    ends = {"initial_state": state, "output_final_state": True}
    match name.split(" - ")[0]:
        case "rule recurrent":
            return rule_naive.naive_recurrent_gated_delta_rule(q, k, v, beta, g, op.scale, **ends)
        case "rule chunk":
            return rule_naive.naive_chunk_gated_delta_rule(q, k, v, g, beta, 16, op.scale, **ends)
        case "rule kernel":
            normalise = {"use_qk_l2norm_in_kernel": not op.normalised}
            return rule.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, scale=op.scale, **ends, **normalise)
        case "delta kernel":
            normalise = {"use_qk_l2norm_in_kernel": not op.normalised}
            return delta.fused_recurrent_delta_rule(q, k, v, beta, scale=op.scale, **ends, **normalise)
        case "delta recurrent":
            o, S = delta_naive.delta_rule_recurrence(*(x.transpose(1, 2) for x in (q, k, v, beta)), **ends)
            return o.transpose(1, 2), S
        case "delta chunk":
            o, S = delta_naive.delta_rule_chunkwise(*(x.transpose(1, 2) for x in (q, k, v, beta)), 16)
            return o.transpose(1, 2), S
        case _:
            return product_naive.naive_recurrent_gated_delta_product(
                q, k, v, g, beta, op.scale, num_householder=op.steps, **ends
            )


def generate_layers(folder: Path):
    from fla.layers import DeltaNet, GatedDeltaNet, GatedDeltaProduct

    classes = {"delta_net": DeltaNet, "gated_deltanet": GatedDeltaNet, "gated_deltaproduct": GatedDeltaProduct}
    for seed, (name, case) in enumerate(LAYERS.items()):
        layer = classes[case.family](**case.options, layer_idx=0).eval()
        randomise(layer, seed)
        arrays = {f"weight {k}": x.numpy() for k, x in layer.state_dict().items()}
        np.savez(folder / f"{name}.npz", **arrays, **run_layer(layer, *layer_inputs(case)))


def run_layer(layer, x: np.ndarray, mask: np.ndarray | None) -> dict[str, np.ndarray]:
    """Outputs, S and tail of every segment."""
    from fla.models.utils import Cache

    cache, arrays, begin = Cache(), {}, 0
    for i, length in enumerate(LAYER_SEGMENTS):
        end = begin + length
        attention = None if mask is None else torch.tensor(mask[:, :end].astype(np.int64))
        segment = torch.tensor(x[:, begin:end])
        with torch.no_grad():
            y, _, cache = layer(segment, attention_mask=attention, past_key_values=cache, use_cache=True)
        S, tail = linear_snapshot(layer, cache[0])
        arrays |= {f"{i} y": y.numpy(), f"{i} S": S, f"{i} tail": tail}
        begin = end
    return arrays


def generate_models(folder: Path):
    import transformers

    for seed, (name, case) in enumerate(MODELS.items()):
        config = transformers.AutoConfig.for_model(case.family, **case.config)
        model = transformers.AutoModelForCausalLM.from_config(config)
        randomise(model, seed)
        model.save_pretrained(folder / name)
        save_run(folder / name, case, case.splits)
        for parameter_name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(DTYPE_OF_STORED.get(parameter_name.rsplit(".")[-1], torch.bfloat16))
        model.save_pretrained(folder / f"{name}, bf16")


def run_saved(folder: Path):
    """The first segment of each, with what stands beside it."""
    for name, case in MODELS.items():
        save_run(folder / name, case, case.splits[:1])


def save_run(folder: Path, case, splits):
    """Logits and the carried arrays of every layer after every segment, beside the checkpoint."""
    tokens, mask = model_inputs(case)
    arrays = {}
    for i, (logits, snapshots) in enumerate(Reference(folder).segments(tokens, splits, mask)):
        arrays[f"{i} logits"] = logits
        for j, (first, second) in enumerate(snapshots):
            arrays |= {f"{i} layer {j} first": first, f"{i} layer {j} second": second}
    np.savez(folder.with_name(folder.name + ".npz"), **arrays)


def randomise(module: torch.nn.Module, seed: int):
    """Gates over short and long horizons, norms and biases away from their initial values."""
    rng = np.random.default_rng(seed)
    middles = {"A_log": 0.0, "dt_bias": -2.0}
    with torch.no_grad():
        for name, p in module.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            scale = 1.5 if leaf in middles else 0.3 if p.ndim == 1 else (2 if "conv" in name else 1) * p.shape[-1] ** -0.5
            middle = middles.get(leaf, float("norm" in name))
            p.copy_(torch.tensor(middle + scale * rng.standard_normal(tuple(p.shape)), dtype=p.dtype))


PARTS = {"ops": generate_ops, "layers": generate_layers, "models": generate_models, "saved": run_saved}


if __name__ == "__main__":
    torch.set_num_threads(1)
    import_fla()
    PARTS[sys.argv[1]](Path(sys.argv[2]))
