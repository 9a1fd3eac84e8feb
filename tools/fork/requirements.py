# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Lists what a built wheel requires, as pip reads it from a file.

    python -m tools.fork.requirements dist/vllm-*.whl ray > requirements.txt

An image installs these before the wheel, into a layer that stays while they do. Needs
Python's own library only, since that is all there is when an image is built.
"""

import argparse
import re
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

from tools.fork.errors import ForkError

#: How setuptools ends a requirement of an extra: alone, or after another condition.
OF_EXTRA = re.compile(r'(; | and )extra == "(.+)"$')


def requirements_of(wheel: Path, extras: list[str]) -> list[str]:
    """Requirements of a wheel and of some of its extras, in the wheel's order.

    Raises:
        ForkError: The wheel has no such extra.
    """
    with zipfile.ZipFile(wheel) as archive:
        (folder,) = (
            path
            for path in zipfile.Path(archive).iterdir()
            if path.name.endswith(".dist-info")
        )
        distribution = PathDistribution(folder)
        known = distribution.metadata.get_all("Provides-Extra", [])
        lines = distribution.requires or []
    for extra in extras:
        if extra not in known:
            raise ForkError(f"{wheel}: has no extra {extra!r}; it has {known}")
    requirements = []
    for line in lines:
        match = OF_EXTRA.search(line)
        if not match:
            requirements.append(line)
        elif match[2] in extras:
            requirements.append(line[: match.start()])
    return requirements


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("extras", nargs="*", metavar="extra")
    args = parser.parse_args()
    try:
        print(*requirements_of(args.wheel, args.extras), sep="\n")
    except ForkError as error:
        parser.exit(1, f"error: {error}\n")
