# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""`exl3 compare`: how far two models are apart on a text.

Each of A and B is a checkpoint's folder or a server's address, such as
http://localhost:8000. Checkpoints run here in float32, one layer in memory at a time.
A server must be vLLM's: it is asked for the log-probabilities of its prompt.

A is the reference. The KL divergence is KL(A || B), in nats a token: what is lost by
B standing in for A. A server gives the log-probabilities of a few tokens only. All
other tokens are then counted as one, which makes the divergence a lower bound.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from exl3.tools.shared.arguments import count

#: Tokens of a window, if the models have as many positions.
_WINDOW = 2048


def add_command(commands: Any) -> None:
    """Adds `compare` to the commands of `exl3`."""
    parser = commands.add_parser(
        "compare",
        help="tell how far two checkpoints or servers are apart on a text",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, what in (("A", "the reference"), ("B", "what is compared with it")):
        parser.add_argument(
            name.lower(), metavar=name, help=f"{what}: a folder or a server's address"
        )
    parser.add_argument(
        "--text", type=Path, required=True, metavar="FILE", help="UTF-8 text to read"
    )
    parser.add_argument(
        "--window",
        type=count(least=2),
        metavar="N",
        help=f"tokens that a model reads at once ({_WINDOW}, or its positions)",
    )
    parser.add_argument(
        "--limit", type=count(), metavar="N", help="read the first N windows only"
    )
    servers = parser.add_argument_group("servers")
    servers.add_argument(
        "--logprobs",
        type=_logprobs,
        default=20,
        metavar="K",
        help="tokens to ask for at each position (20, the most that a server gives "
        "unless started with a larger --max-logprobs); -1 for the whole vocabulary",
    )
    servers.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="checkpoint whose tokenizer is used, if A and B are both servers",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw how the divergence is spread (.png, .svg, .pdf)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Compares two models and prints what was found.

    Raises:
        ToolError: An argument cannot be used, or a server does not answer.
        CheckpointError: A checkpoint cannot be run.
    """
    from exl3.tools.compare.measure import compare
    from exl3.tools.compare.report import as_json, lines
    from exl3.tools.compare.sides import check_alike, open_side, pick_tokenizer
    from exl3.tools.compare.windows import cut
    from exl3.tools.shared.figure import check_plot

    if options.plot is not None:
        check_plot(options.plot)
    a, b = (open_side(name, options.logprobs) for name in (options.a, options.b))
    folder = pick_tokenizer((a, b), options.tokenizer)
    text = cut(
        folder,
        options.text,
        options.window,
        min(_WINDOW, a.longest, b.longest),
        options.limit,
    )
    check_alike((a, b), folder, text)
    found = compare(a, b, text.windows)
    if options.json:
        print(json.dumps(as_json(found, text, a, b), indent=2))
    else:
        print("\n".join(lines(found, text, a, b)))
    if options.plot is not None:
        from exl3.tools.compare.plot import draw

        draw(found, options.plot, a.name, b.name)


def _logprobs(text: str) -> int:
    return -1 if text == "-1" else count()(text)
