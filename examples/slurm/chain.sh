#!/usr/bin/env bash
# Three jobs, each of which begins when the one before has succeeded. Type it on the login node, in a folder that all nodes
# see, with the environment activated: examples/slurm/chain.sh PARTITION
set -euo pipefail
partition="${1:?a partition, as sinfo lists them}"

# Submits a component after a job, if one is given; prints the number of its job. TorchX writes the script and sbatch takes
# it, because `torchx run` itself needs accounting (sacct).
submit() {
    local after="${1:+--dependency=afterok:$1}"
    shift
    torchx run -s slurm -cfg "partition=$partition,time=02:00:00" --dryrun "$@" 2>/dev/null | sed -n '/^#!/,$p' |
        sbatch --parsable --kill-on-invalid-dep=yes ${after:+"$after"}
}

# Two jobs with one first node need two ports.
port=$((20000 + RANDOM % 10000))
rows="$(submit "" rec.data.preprocess --recipe ml_100k -- --out films)"
run="$(submit "$rows" rec.train.hybrid -j 2x1 --rdzv_port "$port" --max_retries 3 --recipe stream -- \
    --run_dir films-run --data.name films)"
bundle="$(submit "$run" rec.serve.export --run films-run -- --out films-bundle)"
squeue -j "$rows,$run,$bundle"
