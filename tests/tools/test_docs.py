# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What the documents name is there: files, headings, make targets."""

import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(REPO)
    for folder in (REPO, REPO / "docs", REPO / "examples")
    for path in (folder.glob("*.md") if folder == REPO else folder.rglob("*.md"))
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_FOLDERS = ("tests", "tools", "docs", "csrc", "exl3", "examples")


def anchors(page: Path) -> set[str]:
    """The names by which a page's headings are linked to."""
    headings = re.findall(r"^#+ (.+)$", _FENCED.sub("", page.read_text()), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in kept}


def targets() -> set[str]:
    """What `make` can be asked for."""
    makefile = (REPO / "Makefile").read_text()
    return set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))


def test_there_are_pages():
    assert Path("README.md") in PAGES
    assert Path("docs/README.md") in PAGES


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    for link in _LINK.findall(_FENCED.sub("", (REPO / page).read_text())):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (REPO / page).parent / name if name else REPO / page
        assert target.exists(), f"{page}: {link}: no such file"
        if anchor:
            assert anchor in anchors(target), f"{page}: {link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_paths_and_commands_exist(page):
    if page.parts[:2] == ("docs", "upstream"):
        return  # those name upstream's files, which are not here
    text = (REPO / page).read_text()
    for code in _CODE.findall(_FENCED.sub("", text)):
        if re.fullmatch(rf"({'|'.join(_FOLDERS)})/[\w./-]*", code):
            assert (REPO / code).exists(), f"{page}: `{code}` is not there"
    for target in re.findall(r"^(?:\w+=\S+ )*make ([a-z-]+)", text, re.MULTILINE):
        assert target in targets(), f"{page}: make has no target {target}"
    for target in re.findall(r"`(?:\w+=\S+ )*make ([a-z-]+)", text):
        assert target in targets(), f"{page}: make has no target {target}"


@pytest.mark.parametrize("index", ["docs", "docs/upstream"])
def test_an_index_names_every_page(index):
    text = (REPO / index / "README.md").read_text()
    below = {p.relative_to(index) for p in PAGES if p.is_relative_to(index)}
    missing = [
        str(page)
        for page in below - {Path("README.md")}
        if f"({page})" not in text and f"({page.parent}/README.md)" not in text
    ]
    assert missing == []
