# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The demo model's tokenizer: byte-level BPE trained on the demo text.

python -m tools.demo_model.tokenizer --work-dir build/demo_model
"""

import argparse
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.demo_model import corpus
from tools.demo_model.files import CORPUS_FILE, TOKENIZER_FILE, made

VOCAB_SIZE = 1024
EOS_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"
EOS_ID, PAD_ID = 0, 1


def train(texts: list[str]) -> Tokenizer:
    """Trains the tokenizer.

    Args:
        texts: The training texts, one chapter each.

    Returns:
        A tokenizer with `VOCAB_SIZE` entries: the two special tokens, the 256
        bytes, and merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS_TOKEN, PAD_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    """Trains on the training split and writes `tokenizer.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True)
    work_dir = parser.parse_args().work_dir
    chapters, _ = corpus.split(corpus.read_chapters(made(work_dir, CORPUS_FILE)))
    texts = [corpus.running_text(chapter) for chapter in chapters]
    tokenizer = train(texts)
    tokenizer.save(str(work_dir / TOKENIZER_FILE))
    tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts))
    size = sum(len(text.encode()) for text in texts)
    print(f"{tokenizer.get_vocab_size()} entries, {size / tokens:.2f} bytes a token")


if __name__ == "__main__":
    main()
