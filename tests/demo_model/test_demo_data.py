# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The demo text: cleaning, splitting, tokens, windows."""

from itertools import pairwise

import pytest
import torch
from transformers import AutoTokenizer

from tools.demo_model import corpus, export
from tools.demo_model.data import Data
from tools.demo_model.files import CORPUS_FILE, TOKENIZER_FILE, made
from tools.demo_model.tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE

PRINTED = """\
Ge1:1 In the beginning God created the heaven and the earth.
Ge1:2 And the earth was without form, and void.
Ge2:1 Thus the heavens and the earth were finished.
1Sm1:1 Now there was a certain man of Ramathaimzophim: 1 man.
"""


def test_verses_lose_their_references_and_chapters_part():
    text = corpus.plain_text(PRINTED)
    blocks = [block.split("\n") for block in text.rstrip("\n").split("\n\n")]
    assert [len(block) for block in blocks] == [2, 1, 1]
    assert blocks[2] == ["Now there was a certain man of Ramathaimzophim: 1 man."]


def test_a_line_that_is_no_verse_is_refused():
    with pytest.raises(RuntimeError, match="not a verse: 'bible: cannot open"):
        corpus.plain_text(PRINTED + "bible: cannot open bible.data\n")


def test_held_out_chapters_are_whole_spread_and_not_trained_on():
    chapters = [[f"chapter {index}"] for index in range(1189)]
    train, heldout = corpus.split(chapters)
    assert sorted(train + heldout) == sorted(chapters)
    assert not {c[0] for c in train} & {c[0] for c in heldout}
    assert 0.02 < len(heldout) / len(chapters) < 0.04
    places = [chapters.index(chapter) for chapter in heldout]
    assert max(b - a for a, b in pairwise(places)) == corpus.HELDOUT_EVERY


@pytest.mark.parametrize(
    "text",
    ["And God said,", "  two  spaces ", "naïve café 東京 🙂\n\ttab", "", "\x00\x7f"],
)
def test_every_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert not {EOS_ID, PAD_ID} & set(ids)


def test_special_tokens_are_single_tokens(tokenizer):
    assert tokenizer.encode("<|endoftext|><|pad|>").ids == [EOS_ID, PAD_ID]
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE


def test_chat_is_the_messages_in_a_row(tokenizer, equal_model, tmp_path):
    export.write(equal_model, tokenizer, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    chat = [
        {"role": "system", "content": "In the beginning "},
        {"role": "user", "content": " God created"},
    ]
    prompt = loaded.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    assert prompt == "In the beginning God created"
    assert (loaded.eos_token_id, loaded.pad_token_id) == (EOS_ID, PAD_ID)


@pytest.fixture
def data(tokenizer, tmp_path) -> Data:
    """60 chapters of 3 numbered verses."""
    chapters = [
        [f"Verse {chapter}:{verse} of the earth." for verse in range(3)]
        for chapter in range(60)
    ]
    text = "\n\n".join("\n".join(chapter) for chapter in chapters) + "\n"
    (tmp_path / CORPUS_FILE).write_text(text)
    tokenizer.save(str(tmp_path / TOKENIZER_FILE))
    return Data(tmp_path)


def test_windows_start_as_a_prompt_does_and_run_on(data):
    windows = data.windows(seed=1, step=0, batch=8, length=100)
    assert windows.shape == (8, 100)
    for window in windows:
        text = data.tokenizer.decode(window.tolist(), skip_special_tokens=False)
        assert text.startswith("Verse ")
        first = text.split(" of ")[0]
        chapter, verse = map(int, first.removeprefix("Verse ").split(":"))
        following = (
            f" Verse {chapter}:{verse + 1}" if verse < 2 else "<|endoftext|>Verse"
        )
        assert text.startswith(f"{first} of the earth.{following}")


def test_windows_are_a_function_of_seed_and_step(data):
    same = [data.windows(1, 5, 4, 32) for _ in range(2)]
    assert torch.equal(*same)
    assert not torch.equal(same[0], data.windows(1, 6, 4, 32))
    assert not torch.equal(same[0], data.windows(2, 5, 4, 32))


def test_no_window_holds_held_out_text(data):
    heldout = {data.tokenizer.decode(c.tolist()).split(":")[0] for c in data.heldout}
    stream = data.tokenizer.decode(data.stream.tolist())
    assert len(heldout) == len(data.heldout) == 2
    assert not any(f"{chapter}:" in stream for chapter in heldout)


def test_held_out_chapters_are_counted_in_bytes(data):
    texts = [data.tokenizer.decode(chapter.tolist()) for chapter in data.heldout]
    assert data.heldout_bytes == sum(len(text.encode()) for text in texts)


def test_a_missing_file_names_the_step_that_makes_it(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"tokenizer.json: not there; first run: .*tokenizer"
    ):
        Data(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"pruned.pt: .*demo_model.prune "):
        made(tmp_path, "pruned.pt")
