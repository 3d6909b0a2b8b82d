"""``jaxdelta info``: facts about a checkpoint."""

import argparse
from collections import Counter

from jaxdelta.checkpoints import inspect
from jaxdelta.cli.arguments import MODEL_HELP, add_revision, add_segment
from jaxdelta.report.sheet import Facts
from jaxdelta.report.terminal import Terminal
from jaxdelta.runs.capacity import gib, run_memory
from jaxdelta.runs.segments import run


def add_info(commands) -> None:
    """Add the command to a parser's ``commands``."""
    info = commands.add_parser(
        "info",
        help="say what a checkpoint is and what a run needs",
        description="Say what a checkpoint is, what would be loaded, and how much memory a run needs.",
    )
    info.set_defaults(call=info_command, device=False)
    info.add_argument("model", help=MODEL_HELP)
    add_segment(info, run)
    info.add_argument("--max-length", type=int, default=16384, help="tokens of the longest text; default: %(default)s")
    add_revision(info)


def info_command(arguments: argparse.Namespace, console: Terminal) -> None:
    """Describe a checkpoint."""
    info = inspect(arguments.model, revision=arguments.revision)
    c = info.config
    linear, attention = len(c.linear_layers), c.num_layers - len(c.linear_layers)
    writes = f", {c.num_householder} writes a token" if c.num_householder > 1 else ""
    shapes = Counter(sizes.state for sizes in c.linear_sizes)
    states = ", ".join(f"{n} layers x {H} heads of {K} x {V}" for (H, K, V), n in shapes.items()) or "0 layers"
    ignored = ", ".join(f"{len(names)} of {group}" for group, names in info.ignored.items()) or "none"
    stored = ", ".join(f"{count} in {kind}" for kind, count in info.stored_dtypes.items())
    about = {
        "folder": str(info.folder) + (f" (revision {info.revision})" if info.revision else ""),
        "architecture": f"{c.title}, {c.num_layers} layers: {linear} {c.linear_title}, {attention} attention",
        "states": f"{states} (K x V){writes}",
        "width, MLP, vocabulary": f"{c.width}, {c.mlp_width}, {c.vocab_size} ({'tied' if c.tied else 'untied'} head)",
        "parameters": f"{info.num_parameters:,} in {info.num_tensors} tensors: {stored}",
        "weights": ", ".join(info.files) + (f"; not read: {', '.join(info.unread)}" if info.unread else ""),
        "ignored tensors": ignored,
        "tokenizer": ", ".join(info.tokenizer_files) or "none: give documents as token ids, or --tokenizer",
    }
    for dtype in ("float32", "bfloat16"):
        needed = run_memory(c, dtype=dtype, segment=arguments.segment, max_length=arguments.max_length)
        about[f"memory, {dtype}"] = (
            f"{gib(needed.total(1))} for a row of {arguments.max_length:,} tokens: parameters {gib(needed.parameters)}, "
            f"logits {gib(needed.logits)}; for each row carry {gib(needed.row_carry)}, work {gib(needed.row_work)}"
        )
    console.print(Facts(about))
