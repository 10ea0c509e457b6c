#!/usr/bin/env bash
# Measures the shipped cost table anew on the GPU at hand, within SECONDS (default 320), into OUT/h200.csv; what is there
# already is kept. To be started in the root of a checkout; run it again to go on where it stopped. TORCHAO (default 0)
# of the seconds are for torchao, which tunes every shape at its first call: last, and the forward of loka27 only.
# usage: benchmarks/h200_table.sh OUT [SECONDS [TORCHAO]]
set -u
out=${1:?usage: benchmarks/h200_table.sh OUT [SECONDS [TORCHAO]]}
limit=${2:-320}
torchao=${3:-0}
export PYTHONWARNINGS=ignore
# Libraries that compile at their first call need more time for that, and a run of their own.
providers=${PROVIDERS:--torchao} dtypes=${DTYPES:-bfloat16,float32} prepare=${PREPARE:-0.25}
bench() {
    timeout -k 10 $((limit - SECONDS)) python3 -m loka_compile.cli bench --shapes benchmarks/shapes/lrm.csv \
        --out "$out/h200.csv" "$@"
}
for attempt in 1 2 3 4; do
    left=$((limit - torchao - SECONDS - 8))
    [ $left -gt 20 ] || break
    bench "--providers=$providers" --dtypes "$dtypes" --seconds $left --prepare "$prepare"
    status=$?
    # 2 is a mistake in the call; anything else but 0 is a kernel that took the process down, and is not tried again.
    [ $status -eq 0 ] && break
    [ $status -eq 2 ] && exit 2
    echo "attempt $attempt ended with status $status" >&2
done
left=$((limit - SECONDS - 8))
[ "$torchao" -gt 0 ] && [ $left -gt 20 ] && bench --providers torchao --groups loka27 --roles forward --seconds $left
wc -l "$out/h200.csv"
