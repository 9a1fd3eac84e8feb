# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What mkdocs.yml hooks in, so that pages mean the same on a site as in the repository.

A link to a file outside docs/ leads to the file where the repository is hosted. In a
workflow of GitHub its address is known; elsewhere such a link is text. Headings have
the names that GitHub gives them, since pages link to these.
"""

import os
import re
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> None:
    """Names headings as GitHub does."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads links out of docs/ to the repository."""
    folder = Path(page.file.abs_src_path).parent
    return links_outside(markdown, folder, repository())


def slug(heading: str, separator: str = "-") -> str:
    """The name by which a heading is linked to."""
    kept = re.sub(r"[^\w\- ]", "", heading.lower())
    return kept.strip().replace(" ", separator)


def repository() -> str | None:
    """Where the files of this commit can be seen, if a workflow of GitHub says it."""
    server, name = (
        os.environ.get(f"GITHUB_{word}") for word in ("SERVER_URL", "REPOSITORY")
    )
    commit = os.environ.get("GITHUB_SHA", "main")
    return f"{server}/{name}/blob/{commit}" if server and name else None


def links_outside(markdown: str, folder: Path, address: str | None) -> str:
    """A page with the links that lead out of docs/ replaced.

    Args:
        markdown: The page.
        folder: The page's folder.
        address: Of the repository's files; without one, such a link becomes its text.
    """

    def replaced(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target:
            return match[0]
        path = (folder / target).resolve()
        if path.is_relative_to(REPO / "docs"):
            return match[0]
        if address is None:
            return text
        return f"[{text}]({address}/{path.relative_to(REPO)}{anchor})"

    return "".join(
        part if part.startswith("```") else _LINK.sub(replaced, part)
        for part in _FENCED.split(markdown)
    )
