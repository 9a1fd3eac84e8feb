# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Comparisons of models, and the table and the picture that are made of them."""

import math
import xml.etree.ElementTree as ElementTree

import pytest
import torch
import torch.nn.functional as F

from tools.demo_model import quality
from tools.demo_model.compare import Comparison, compare, outputs
from tools.demo_model.evaluate import heldout_sums, summary
from tools.demo_model.plot import divergence_curves

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, 320, (n,), generator=generator) for n in (40, 17)]


def test_a_model_beside_itself_is_the_same(ragged_model, texts):
    expected = [outputs(ragged_model, text) for text in texts]
    found = compare(expected, ragged_model, texts, num_bytes=100)
    measured = summary(heldout_sums(ragged_model, texts), num_bytes=100)
    assert found == Comparison(
        bits_per_byte=pytest.approx(measured["bits_per_byte"]),
        bits_per_byte_ratio=1.0,
        kl=0.0,
        top1=1.0,
        mtp_agreement=pytest.approx(measured["mtp_agreement"]),
        reference_mtp_agreement=found.mtp_agreement,
    )


@torch.no_grad()
def test_divergence_is_from_the_reference(ragged_model, texts):
    expected = [outputs(ragged_model, text) for text in texts]
    ragged_model.lm_head.weight[7] += 0.3
    found = compare(expected, ragged_model, texts, num_bytes=100)
    kl = same = 0.0
    for text, before in zip(texts, expected):
        p = before.logprobs.double().exp()
        after = ragged_model.logits(ragged_model.trunk(text[None, :-1]))[0].double()
        kl += float((p * (p.log() - F.log_softmax(after, -1))).sum())
        same += int((p.argmax(-1) == after.argmax(-1)).sum())
    tokens = sum(len(text) - 1 for text in texts)
    assert found.kl == pytest.approx(kl / tokens, rel=1e-4)
    assert found.kl > 0.01
    assert found.top1 == same / tokens
    ratio = found.bits_per_byte * 100 * math.log(2) / found.bits_per_byte_ratio
    nats = sum(
        F.nll_loss(e.logprobs, t[1:]) * (len(t) - 1) for t, e in zip(texts, expected)
    )
    assert ratio == pytest.approx(float(nats))


def figures() -> quality.Figures:
    """Figures that differ in every pack."""
    found = {}
    for bits in quality.BITS:
        for row, label in enumerate(quality.CODEBOOKS):
            kl = 4.0**-bits * (1 + row / 8)
            found[bits, label] = Comparison(1.2 + kl, 1 + kl / 1.2, kl, 0.9, 0.7, 0.71)
    return found


def test_the_page_gets_a_new_table_and_keeps_its_text():
    page = f"before\n\n{quality.BEGIN}\nold\n{quality.END}\n\nafter\n"
    once = quality.filled(page, quality.table(figures()))
    assert once == quality.filled(once, quality.table(figures()))
    assert once.startswith("before\n") and once.endswith("\nafter\n")
    assert "old" not in once
    rows = [line.split(" | ") for line in once.splitlines() if line.startswith("| ")]
    assert {len(row) for row in rows} == {7}
    assert [row[0] for row in rows[1:-1]] == [
        f"| {b}" for b in (2, 3, 4, 5, 6) for _ in "abc"
    ]
    assert rows[-1][1:3] == ["BF16", "1.2000"]


def test_the_picture_has_a_falling_curve_for_each_codebook():
    points = {
        label: {bits: figures()[bits, label].kl for bits in quality.BITS}
        for label in quality.CODEBOOKS
    }
    root = ElementTree.fromstring(divergence_curves(points))
    curves = root.findall(f"{SVG}polyline")
    assert len(curves) == 3
    assert len(root.findall(f"{SVG}circle")) == 15
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for curve in curves:
        places = [
            tuple(map(float, p.split(","))) for p in curve.attrib["points"].split()
        ]
        assert places == sorted(places)  # to the right, and down on the screen
        assert [y for _, y in places] == sorted(y for _, y in places)
        assert all(0 < x < width and 0 < y < height for x, y in places)
