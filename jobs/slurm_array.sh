#!/bin/bash
# One job as an array of 8 tasks, each with its share of the rows: sbatch jobs/slurm_array.sh
# A task that runs out of time, or is preempted, is queued again and goes on where it was. When all have ended:
#   cbgen merge shards/out-*.parquet --out out.parquet
#SBATCH --array=0-7
#SBATCH --time=08:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -u
mkdir -p shards

# cbgen takes its shard from SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT, and {shard} becomes its number.
cbgen run sample_data/prompts.parquet --model "${MODEL:-smollm2}" --chat --max-tokens 256 \
    --out 'shards/out-{shard}.parquet' --drain-timeout 90 &
job=$!
trap 'kill -USR1 "$job"' USR1 TERM
wait "$job"
code=$?
while kill -0 "$job" 2>/dev/null; do  # a signal ends the first wait
    wait "$job"
    code=$?
done
if [ "$code" -eq 75 ]; then  # stopped, and the same command continues
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
fi
exit "$code"
