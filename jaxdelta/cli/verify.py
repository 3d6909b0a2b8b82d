"""``jaxdelta verify``: tells where to run the comparison with torch, which is not part of the installed package."""

import argparse
import shlex
from pathlib import Path

from jaxdelta.report.terminal import Terminal

CHECKOUT = Path(__file__).parents[2]


def add_verify(commands) -> None:
    """Add the command to a parser's ``commands``."""
    verify = commands.add_parser(
        "verify",
        help="say where a checkpoint is compared with its torch reference",
        description="A checkpoint is compared with its torch reference by python -m ports.verify, which needs torch and a "
        "checkout of the repository. This says where that is, with the arguments given.",
        add_help=False,
        prefix_chars="\0",  # the options are that command's
    )
    verify.add_argument("arguments", nargs="*", help="of python -m ports.verify")
    verify.set_defaults(call=verify_command, device=False)


def verify_command(arguments: argparse.Namespace, console: Terminal) -> None:
    """Tell which command to run, and where.

    Raises:
        ValueError: always; nothing was compared.
    """
    command = shlex.join(["python", "-m", "ports.verify", *(arguments.arguments or ["MODEL"])])
    if (CHECKOUT / "ports" / "verify.py").is_file():
        raise ValueError(
            f"nothing was compared; the comparison with torch runs in the checkout: cd {CHECKOUT} && {command}"
        )
    raise ValueError(
        "nothing was compared; the comparison with torch is no part of the installed package: in a checkout of the "
        f'repository, pip install -e ".[test]" && {command}'
    )
