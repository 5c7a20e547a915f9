#!/usr/bin/env bash
# Three jobs, each of which begins when the one before has succeeded. Type it on the login node, in a folder that all nodes
# see, with the environment activated: examples/slurm/chain.sh PARTITION
set -euo pipefail
partition="${1:?a partition, as sinfo lists them}"

# Submits a component; prints the number of its job.
submit() {
    local cfg="$1"
    shift
    torchx run -s slurm -cfg "partition=$partition,time=02:00:00$cfg" "$@" | sed -n 's|^slurm://torchx/||p'
}

# Two jobs with one first node need two ports.
port=$((20000 + RANDOM % 10000))
rows="$(submit "" rec.data.preprocess --recipe ml_100k -- --out films)"
run="$(submit ",dependency=afterok:$rows" rec.train.hybrid -j 2x1 --rdzv_port "$port" --max_retries 3 --recipe stream -- \
    --run_dir films-run --data.name films)"
submit ",dependency=afterok:$run" rec.serve.export --run films-run -- --out films-bundle
