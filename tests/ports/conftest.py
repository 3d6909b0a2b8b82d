"""Random Qwen3.5 checkpoints written by transformers' own save_pretrained, and processes that run fla."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ports.packages import import_transformers

ROOT = Path(__file__).parents[2]


def write_random_checkpoint(folder: Path, *, seed: int = 0, **changes) -> Path:
    """Sizes all different; gates spread over short and long horizons, norms and biases away from their initial values."""
    transformers = import_transformers()
    import torch

    config = transformers.Qwen3_5TextConfig(
        **{
            "vocab_size": 97,
            "hidden_size": 44,
            "intermediate_size": 59,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 11,
            "linear_conv_kernel_dim": 4,
            "tie_word_embeddings": True,
            "rope_parameters": rope(24, 0.5),
        }
        | changes
    )
    torch.manual_seed(seed)
    model = transformers.Qwen3_5ForCausalLM(config)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            scale = 0.3 if p.ndim == 1 else 2 * p.shape[-1] ** -0.5 if "conv" in name else p.shape[-1] ** -0.5
            noise = torch.tensor(rng.standard_normal(tuple(p.shape)) * scale, dtype=p.dtype)
            middle = {"A_log": 0.0, "dt_bias": -3.0}.get(name.rsplit(".", 1)[-1], float("linear_attn.norm" in name))
            p.copy_(noise + middle)
    model.save_pretrained(folder)
    return folder


def rope(head_dim: int, fraction: float) -> dict:
    """RoPE fields whose sections add up."""
    pairs = int(head_dim * fraction) // 2
    return {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": fraction,
        "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
        "mrope_interleaved": True,
    }


CHECKPOINTS = {
    "tied, 2 value heads a key head": {},
    "untied, as many": {"tie_word_embeddings": False, "linear_num_value_heads": 2},
    "3 value heads a key head, K > V": {"linear_num_value_heads": 6, "linear_key_head_dim": 13, "linear_value_head_dim": 5},
    "whole head rotates": {"rope_parameters": rope(24, 1.0)},
    "attention alone": {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2},
}


@pytest.fixture(scope="session", params=list(CHECKPOINTS))
def checkpoint(request, tmp_path_factory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("checkpoint"), **CHECKPOINTS[request.param])


FLA_PARTS = ("ops", "layers", "models")


class FlaProcess:
    """fla at work on a part of ``fla_cases`` in a process of its own."""

    def __init__(self, part: str, folder: Path):
        self.part, self.folder = part, folder
        folder.mkdir(exist_ok=True)
        self.log = folder.parent / f"{part}.log"
        command = [sys.executable, "-m", "tests.ports.fla_generate", part, str(folder)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)

    def finished(self) -> Path:
        """The folder of what it gave, once it has; fails with the end of its log where it fails."""
        if self.process.wait():
            pytest.fail(f"fla_generate {self.part}: {self.log.read_text()[-2000:]}", pytrace=False)
        return self.folder


@pytest.fixture(scope="session")
def fla_processes(request, tmp_path_factory):
    """The parts of the reference that this session reads, each in its process, all at once."""
    wanted = {f"fla_{part}" for part in FLA_PARTS} & {name for item in request.session.items for name in item.fixturenames}
    root = tmp_path_factory.mktemp("fla")
    processes = {name: FlaProcess(name.removeprefix("fla_"), root / name) for name in sorted(wanted)}
    yield processes
    for started in processes.values():
        started.process.kill()
        started.process.wait()


@pytest.fixture(scope="session")
def fla_ops(fla_processes) -> Path:
    return fla_processes["fla_ops"].finished()


@pytest.fixture(scope="session")
def fla_layers(fla_processes) -> Path:
    return fla_processes["fla_layers"].finished()


@pytest.fixture(scope="session")
def fla_models(fla_processes) -> Path:
    return fla_processes["fla_models"].finished()
