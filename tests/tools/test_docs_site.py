# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The site has every page, and its links lead where they do in the repository."""

from pathlib import Path

import pytest
import yaml

from tools import docs_site
from tools.docs_site import links_outside, slug

REPO = Path(__file__).resolve().parents[2]
DOCS = REPO / "docs"


def pages(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    inner = nav.values() if isinstance(nav, dict) else nav
    return [page for each in inner for page in pages(each)]


def test_the_site_has_every_page_once():
    named = pages(yaml.safe_load((REPO / "mkdocs.yml").read_text())["nav"])
    there = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(named) == sorted(there)


@pytest.mark.parametrize(
    ("link", "at_home", "hosted"),
    [
        ("[a](../x/y.py)", "a", "[a](https://h/o/r/blob/1/x/y.py)"),
        ("[a](../R.md#part)", "a", "[a](https://h/o/r/blob/1/R.md#part)"),
        *(
            (same, same, same)
            for same in (
                "[a](tools/x.md)",
                "[a](#part)",
                "[a](https://else.where/x)",
                "![a](plot.svg)",
                "\n```text\n[a](../x.py)\n```\n",
            )
        ),
    ],
)
def test_links_out_of_docs(link, at_home, hosted, monkeypatch):
    for name in ("SERVER_URL", "REPOSITORY", "SHA"):
        monkeypatch.delenv(f"GITHUB_{name}", raising=False)
    assert links_outside(link, DOCS, docs_site.repository()) == at_home
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://h")
    monkeypatch.setenv("GITHUB_REPOSITORY", "o/r")
    monkeypatch.setenv("GITHUB_SHA", "1")
    assert links_outside(link, DOCS, docs_site.repository()) == hosted


def test_headings_are_named_as_github_does():
    assert slug("What is checked, without a GPU?") == "what-is-checked-without-a-gpu"
    assert slug("`exl3 inspect`") == "exl3-inspect"
    assert slug("One & two") == "one--two"
