#!/usr/bin/env bash
# Starts the ranks of one host; to be called on every host of the job, in any order.
#
#     FIRST=node-0 HOSTS=4 RANKS=8 examples/hosts.sh examples/resume.py /shared/runs/first
#
# FIRST     name or address of one of the hosts, where all of them meet
# HOSTS     how many take part; 2:4 means that the job goes on with as few as two, when others are gone
# RANKS     processes on this host, one for each GPU
# JOB       a name that no other job on FIRST has now
# PORT      on FIRST, a free one
# RESTARTS  how often all ranks are started anew after one has ended
# LINK      network interface of gloo, where the first one that the host's name leads to is not the right one
# LOCAL     address of this host, where its name does not lead to it
# MEET      more for --rdzv-conf
set -euo pipefail
: "${FIRST:?is missing: the name of the host where all meet}"

# A store for each start: else ranks may find addresses there that those before them have left.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ -n "${LINK:-}" ]; then export GLOO_SOCKET_IFNAME="$LINK" NCCL_SOCKET_IFNAME="$LINK"; fi

exec "${TORCHRUN:-torchrun}" \
    --nnodes="${HOSTS:-2}" --nproc-per-node="${RANKS:-1}" --max-restarts="${RESTARTS:-3}" \
    --rdzv-backend=c10d --rdzv-endpoint="$FIRST:${PORT:-29500}" --rdzv-id="${JOB:-graphzero}" \
    ${LOCAL:+--local-addr="$LOCAL"} ${MEET:+--rdzv-conf="$MEET"} \
    "$@"
