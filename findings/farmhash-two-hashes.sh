#!/usr/bin/env bash
# FarmHash's hash64 is its Fingerprint64 for short texts, and again for texts of 97 to 256 bytes.
#
# Guess: pyfarmhash's hash64 computes what TensorFlow, Keras and BigQuery call Fingerprint64, as every short text shows.
# What happens: the two agree up to 32 bytes, differ from 33 to 96, agree up to 256, and differ beyond. hash64 may
# change between releases and processors; only fingerprint64 is fixed.
# Why it matters: a feature that is hashed for serving by hash64 is right for ids and words, and reads other rows for urls,
# titles and crosses. Tests with short keys, and with a few long ones, do not show it.
# Source: https://github.com/google/farmhash/blob/master/src/farmhash.h, https://github.com/lovell/farmhash/issues/51
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check pyfarmhash==0.5.1

cat > "$work/run.py" <<'PY'
import farmhash

text = "/catalogue/item-17?colour=blue" * 20
lengths = [n for n in range(1, 400) if farmhash.hash64(text[:n]) != farmhash.fingerprint64(text[:n])]
starts = [n for n in lengths if n - 1 not in lengths]
ends = [n for n in lengths if n + 1 not in lengths]
print("lengths in bytes at which they differ:", ", ".join(f"{a} to {b}" for a, b in zip(starts, ends, strict=True)))
PY

echo "pyfarmhash 0.5.1"
(cd "$work" && venv/bin/python run.py) | tee "$work/seen"
diff "$work/seen" - <<'WANT'
lengths in bytes at which they differ: 33 to 96, 257 to 399
WANT
