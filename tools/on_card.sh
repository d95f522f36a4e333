#!/usr/bin/env bash
# The GPU tier on a machine with a GPU and without a network: tools/on_card.sh [BUNDLE [OUT]]
#
# BUNDLE (default .bench/gpu-bundle) is what `make gpu-bundle` fetched. Wheels go to a temporary folder, nothing of the machine's own
# Python changes. Then come the tests that take a GPU, a soak test, and the benchmark part by part, the most wanted first, each with a
# time limit of its own and all within SECONDS_IN_ALL (540). OUT (default build/on-card) has a log or a JSON file of each
# step as soon as it ends, so that nothing is lost if time is over. PARTS names parts of the benchmark; STEPS is any of
# "tests soak bench sanitize". Ends with 1 where a test or the soak test failed. Without a GPU it says so and ends well.
set -uo pipefail
cd "$(dirname "$0")/.."
bundle=${1:-.bench/gpu-bundle} out=${2:-build/on-card}
python=${PYTHON:-python3} began=$SECONDS most=${SECONDS_IN_ALL:-540}
steps=${STEPS:-tests soak bench sanitize}
parts=${PARTS:-keys streamed beside tenth pooled resident filled threads module predicted changed together tiered}
failed=0
mkdir -p "$out"

say() { printf '%4d s  %s\n' $((SECONDS - began)) "$*" | tee -a "$out/summary.txt"; }
# LIMIT NAME COMMAND…: the command, with its output in OUT/NAME.txt, in LIMIT seconds or what is left
run() {
  local limit=$1 name=$2 left=$((most - SECONDS + began)) rc
  shift 2
  if [ "$left" -lt 10 ]; then say "$name: not run, no time left"; return 2; fi
  timeout --kill-after=10 "$((limit < left ? limit : left))" "$@" >"$out/$name.txt" 2>&1
  rc=$?
  say "$name: $([ $rc = 0 ] && echo ended || echo "rc $rc") $(tail -n 1 "$out/$name.txt" | cut -c1-160)"
  return $rc
}

wheels=("$bundle"/*.whl)
if [ -e "${wheels[0]}" ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check --target "$site" "${wheels[@]}" || exit
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
else
  say "$bundle has no wheels: the packages that are installed are used"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
"$python" - >"$out/machine.txt" 2>&1 <<'PY' || { cat "$out/machine.txt"; exit 1; }
from importlib import metadata
import tierstore
from benchmarks.machine import describe
from tierstore.tiers.device.cupy_device import find_devices
print(describe())
for name in "numpy", "numba", "cupy-cuda13x", "cupy-cuda12x", "torch", "jax", "onnxruntime", "onnxruntime-gpu", "rocksdict":
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "is not installed")
count, why = find_devices()
print(f"{count} GPUs" if count else f"no GPU: {why}")
PY
say "$(tail -n 1 "$out/machine.txt")"
if ! tail -n 1 "$out/machine.txt" | grep -q 'GPUs$'; then exit 0; fi
nvidia-smi >>"$out/machine.txt" 2>&1

for step in $steps; do
  case $step in
    tests)
      run 180 tests "$python" -m pytest -m gpu -n 10 --dist loadfile -q -rfEs -p no:cacheprovider tests/tiers/test_device*.py \
        tests/engine/data/test_device_tier.py tests/engine/reads/test_on_gpu.py tests/torch/test_operators.py || failed=1 ;;
    soak) run 60 soak "$python" -m tools.soak_device --kind gpu --seconds 20 || failed=1 ;;
    bench)
      hkv=()
      [ -e "$bundle/hierarchical_kv.so" ] && hkv=(--hkv "$bundle/hierarchical_kv.so")
      for part in $parts; do
        run 60 "bench-$part" "$python" -m benchmarks.device_lookup --parts "$part" "${hkv[@]}" --json "$out/$part.json"
      done ;;
    sanitize)
      if command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck; do
          run 90 "$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" -m tools.soak_device --kind gpu --seconds 5 || failed=1
        done
      else
        say "no compute-sanitizer here"
      fi ;;
    *) say "no such step: $step" && exit 2 ;;
  esac
done
exit $failed
