#!/usr/bin/env bash
# FBGEMM's mean of weighted rows divides by the number of rows, and an id beyond the table counts as row 0.
#
# Guess: pooling MEAN with weights is the weighted mean, sum(w * row) / sum(w), as TensorFlow's `embedding_lookup_sparse` has it; an id that the table lacks
# is an error, as in nn.EmbeddingBag, or nothing.
# What happens: it is sum(w * row) / n. An id beyond the table is made 0 by the default check of bounds, with a line in the log: row 0
# counts. The same in training and of quantized tables for inference.
# Why it matters: TorchRec's sharded collections keep their rows in such tables, and whole tables are pooled by them; for tables sharded by rows it divides by the
# sum of the weights itself (from its source), so with weights a mean depends on the sharding plan. (Its unsharded collections, which are nn.EmbeddingBag, refuse weights with a mean.)
# A server that divides otherwise, or that answers unknown ids with zeros, feeds the dense part other numbers than it was trained with.
# Source: https://github.com/pytorch/FBGEMM/blob/main/fbgemm_gpu/fbgemm_gpu/split_table_batched_embeddings_ops_common.py (BoundsCheckMode),
# https://github.com/meta-pytorch/torchrec/blob/main/torchrec/distributed/embeddingbag.py (_create_mean_pooling_divisor), https://github.com/meta-pytorch/torchrec/pull/1886
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 fbgemm-gpu-cpu==1.8.0 numpy==2.4.6 setuptools

cat > "$work/run.py" <<'PY'
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

ROWS = torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None].expand(4, 4)
training = SplitTableBatchedEmbeddingBagsCodegen(
    [(4, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)], pooling_mode=PoolingMode.MEAN
)
training.split_embedding_weights()[0].data.copy_(ROWS)
inference = IntNBitTableBatchedEmbeddingBagsCodegen(
    [("item", 4, 4, SparseType.INT8, EmbeddingLocation.HOST)],
    pooling_mode=PoolingMode.MEAN, output_dtype=SparseType.FP32, device="cpu",
)  # fmt: skip
inference.initialize_weights()
((codes, scale, bias),) = inference.split_embedding_weights_with_scale_bias(2)
codes.zero_(), scale.fill_(1.0), bias.copy_(ROWS[:, :1].to(bias.dtype))
for name, table, integer in (("training", training, torch.int64), ("inference", inference, torch.int32)):
    def pooled(ids, weights=None):
        offsets = torch.tensor([0, len(ids)], dtype=integer)
        return table(torch.tensor(ids, dtype=integer), offsets, weights)[0, 0].item()

    print(f"{name}: mean of 2 and 3 with weights 0.5 and 0.25:", pooled([1, 2], torch.tensor([0.5, 0.25])))
    print(f"{name}: id 9 of a table of 4 rows:", pooled([9]), "ids 1 and 9:", pooled([1, 9]))
PY

echo "torch 2.13.0, fbgemm-gpu-cpu 1.8.0"
(cd "$work" && venv/bin/python run.py 2>/dev/null) | tee "$work/seen"
diff "$work/seen" - <<'WANT'
training: mean of 2 and 3 with weights 0.5 and 0.25: 0.875
training: id 9 of a table of 4 rows: 1.0 ids 1 and 9: 1.5
inference: mean of 2 and 3 with weights 0.5 and 0.25: 0.875
inference: id 9 of a table of 4 rows: 1.0 ids 1 and 9: 1.5
WANT
