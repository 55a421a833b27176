#!/usr/bin/env bash
# What each node of a job runs, whoever has started it: one torchrun, and under it the node's ranks.
#
#   HEAD=10.0.0.1 NODES=2 NODE=0 deploy/node.sh -m ddpz_lite train --stage 3    on the first host
#   HEAD=10.0.0.1 NODES=2 NODE=1 deploy/node.sh -m ddpz_lite train --stage 3    on the second
#
# HEAD   address or name of node 0, the same on all nodes; not localhost
# NODES  how many there are      NODE  which one this is, from 0
# JOB    a name that only this job has (default: ddpz)   PORT  of the rendezvous (default: 29500)
# RANKS  processes on this node: a number, gpu or cpu (default: gpu where there are GPUs, else 2)
# WAIT   seconds in which all nodes must have come (default: 600)
# RESTARTS  how often all ranks may be started anew after a failure (default: 3)
set -euo pipefail
: "${HEAD:?is not set: the address of node 0}" "${NODES:?is not set: how many nodes}" "${NODE:?is not set: which one this is}"
if [ "${RANKS:-}" = "" ]; then
    if [ -e /dev/nvidiactl ]; then RANKS=gpu; else RANKS=2; fi
fi

# Who has several network interfaces must say which one leads to the others: that by which this
# node reaches HEAD. torchrun would tell its name in its place, and gloo would take the address of it.
if command -v ip >/dev/null; then
    head=$(getent ahostsv4 "$HEAD" | awk 'NR == 1 {print $1}')
    here=$(ip -o -4 route get "${head:?cannot be resolved: $HEAD}" | sed -nE 's/.* src ([0-9.]+).*/\1/p')
    interface=$(ip -o -4 address show to "$here" | awk 'NR == 1 {print $2}')
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$interface}
fi

echo "node $NODE of $NODES (${here:-$(hostname)}, ${interface:-any interface}) meets the others at $HEAD:${PORT:-29500}, job ${JOB:-ddpz}" >&2

# A restart must not find the addresses of the dead in the store of the rendezvous.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "$NODES" --nproc-per-node "$RANKS" --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-id "${JOB:-ddpz}" --rdzv-endpoint "$HEAD:${PORT:-29500}" \
    --rdzv-conf "join_timeout=${WAIT:-600},is_host=$([ "$NODE" = 0 ] && echo true || echo false)" \
    ${here:+--local-addr "$here"} "$@"
