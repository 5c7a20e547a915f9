#!/usr/bin/env bash
# From a raw log to a service: preprocess, train and export, serve. Run it again to continue where it was stopped.
#
#     examples/log_to_service.sh FOLDER [LOG]
#
# LOG has the columns of Taobao's UserBehavior: user_id, item_id, category_id, behavior_type, timestamp. Without LOG it
# generates one, whose users come back to the same kind of item. RANKS, EPOCHS and PORT are read from the environment.
set -euo pipefail

folder=$1
log=${2:-$folder/log.parquet}
mkdir -p "$folder"
if [ ! -e "$log" ] && [ $# -lt 2 ]; then
    python - "$log" << 'PROGRAM'
import sys

import pyarrow as pa
import pyarrow.parquet as pq
from torchrec_ext.data.planted import planted_log

columns = planted_log(users=160, items=60, clicks=40).columns
clicks = pa.array(["pv"] * len(columns["user_id"]))
pq.write_table(pa.table({**columns, "behavior_type": clicks}), sys.argv[1])
PROGRAM
fi

# The summary is written last, so a stage that has one is whole.
[ -f "$folder/data/summary.json" ] ||
    python -m torchx_apps.preprocess --recipe taobao --config.path "$log" --out "$folder/data"
[ -f "$folder/run/summary.json" ] ||
    python -m torch.distributed.run --standalone --nproc-per-node "${RANKS:-1}" -m torchx_apps.train --recipe bst \
        --run_dir "$folder/run" --data.name "$folder/data" --train.epochs "${EPOCHS:-2}" \
        --export require
exec python -m torchx_apps.serve "$folder/run/bundle" --port "${PORT:-8000}"
