#!/usr/bin/env bash
# The guess: row i of `embeddings` in a model2vec folder's model.safetensors is the vector of token i.
# What happens: after vocabulary quantization the tensor holds as many rows as there are clusters; `mapping` says which of them a
#   token has, and `weights` by what it is multiplied. Even a model without weights gets some then: its vectors' lengths move
#   into `weights`, and the rows of `embeddings` are means of vectors of length 1. The file alone looks like a small table.
# Why it matters: an importer that takes the one matrix in the file serves cluster centres under the first few tokens' ids, and
#   nothing for all others.
# Source: https://github.com/MinishLab/model2vec (model2vec/model.py, _encode_helper; vocabulary_quantization.py)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check 'model2vec[quantization]==0.10.0' safetensors==0.8.0
venv/bin/python - <<'PYTHON'

import numpy as np
from importlib.metadata import version
from model2vec import StaticModel
from model2vec.model import quantize_model
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

print("model2vec", version("model2vec"))
words = [f"w{i}" for i in range(11)] + ["[UNK]"]
tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = Whitespace()
vectors = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
model = quantize_model(StaticModel(vectors, tokenizer, normalize=False), vocabulary_quantization=3)
model.save_pretrained("saved")
tensors = load_file("saved/model.safetensors")
for name, tensor in sorted(tensors.items()):
    print(f"  {name}: {tensor.dtype} {list(tensor.shape)}")
assert tensors["embeddings"].shape == (3, 4), "changed: one row a token"
assert {"mapping", "weights"} <= tensors.keys(), "changed: no mapping, or no weights"
served = StaticModel.from_pretrained("saved").encode(["w5"])[0]
by_row_of_map = tensors["embeddings"][tensors["mapping"][5]] * tensors["weights"][5]
print("  w5 encodes to          ", np.round(served, 4))
print("  embeddings[mapping] * w", np.round(by_row_of_map, 4))
print("  embeddings[1], token 1?", np.round(tensors["embeddings"][1], 4))
assert np.allclose(served, by_row_of_map, atol=1e-6), "changed: another formula"
assert not any(np.allclose(served, row) for row in tensors["embeddings"]), "changed: a row is a token's vector"
PYTHON
