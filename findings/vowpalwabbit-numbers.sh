#!/usr/bin/env bash
# Vowpal Wabbit does not hash names that are numbers: it adds them to the hash of their namespace.
#
# Guess: a feature's place in the weights is murmur3 of its text, with the namespace's hash as the seed.
# What happens: a name of digits alone is read as a number and added (modulo 2**32, then the bits of -b): "7" and "007" are
# one feature, "17" and "18" lie side by side, and two namespaces overlap wherever their hashes lie near each other. Names
# with anything else, such as "-3" or "1.5", are hashed. Only --hash all does what the guess says.
# Why it matters: item ids are numbers. Who exports weights or embeddings by feature, or serves the same hash elsewhere,
# finds other rows for exactly the ids, and the right ones for all names in the tests.
# Source: https://github.com/VowpalWabbit/vowpal_wabbit/issues/4915
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check vowpalwabbit==9.11.9 mmh3==5.3.1

cat > "$work/run.py" <<'PY'
import mmh3
from vowpalwabbit import Workspace

BITS = 18
for options in ("", "--hash all"):
    vw = Workspace(f"-b {BITS} --quiet {options}")
    space = vw.hash_space("item")
    for name in ("red", "-3", "17", "18", "7", "007"):
        place = vw.hash_feature(name, space) % 2**BITS
        murmur = mmh3.hash(name, space, signed=False) % 2**BITS
        added = (space + int(name)) % 2**BITS if name.isdigit() else None
        how = {murmur: "murmur3", added: "the number added"}[place]
        print(options or "default", name, how)
PY

echo "vowpalwabbit 9.11.9: where a feature lies"
(cd "$work" && venv/bin/python run.py) | tee "$work/seen"
diff "$work/seen" - <<'WANT'
default red murmur3
default -3 murmur3
default 17 the number added
default 18 the number added
default 7 the number added
default 007 the number added
--hash all red murmur3
--hash all -3 murmur3
--hash all 17 murmur3
--hash all 18 murmur3
--hash all 7 murmur3
--hash all 007 murmur3
WANT
