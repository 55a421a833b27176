#!/usr/bin/env bash
# What each node of a job runs: one torchrun, which starts the node's ranks.
#
#   HEAD=10.0.0.1 NODES=2 NODE=0 deploy/node.sh -m ddpz_lite train --stage 3    on the first host
#   HEAD=10.0.0.1 NODES=2 NODE=1 deploy/node.sh -m ddpz_lite train --stage 3    on the second
#
# HEAD   address or name of node 0, the same on all nodes (127.0.0.1 if all nodes are this machine)
# NODES  how many there are      NODE  which one this is, from 0
# JOB    a name that only this job has (default: ddpz)   PORT  of the rendezvous (default: 29500)
# RANKS  processes on this node: a number, gpu or cpu (default: gpu where there are GPUs, else 2)
# WAIT   seconds in which all nodes must have joined (default: 600)
# RESTARTS  how often all ranks may be started again after a failure (default: 3)
# PYTHON the Python that has the course (default: .venv of this checkout, else python)
set -euo pipefail
: "${HEAD:?is not set: the address of node 0}" "${NODES:?is not set: how many nodes}" "${NODE:?is not set: which one this is}"
if [ "${RANKS:-}" = "" ]; then
    if [ -e /dev/nvidiactl ]; then RANKS=gpu; else RANKS=2; fi
fi

# A node with several network interfaces must name the one that leads to the others, which is the one
# by which it reaches HEAD. Otherwise gloo takes the address of the host's name.
if command -v ip >/dev/null; then
    head=$(getent ahostsv4 "$HEAD" | awk 'NR == 1 {print $1}')
    here=$(ip -o -4 route get "${head:?cannot be resolved: $HEAD}" | sed -nE 's/.* src ([0-9.]+).*/\1/p')
    interface=$(ip -o -4 address show to "$here" | awk 'NR == 1 {print $2}')
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$interface}
fi

echo "node $NODE of $NODES (${here:-$(hostname)}, ${interface:-any interface}) joins at $HEAD:${PORT:-29500}, job ${JOB:-ddpz}" >&2

if [ "${PYTHON:-}" = "" ]; then
    PYTHON=$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python
    [ -x "$PYTHON" ] || PYTHON=python
fi
if ! "$PYTHON" -c "import torch" 2>/dev/null; then
    echo "$PYTHON cannot import torch. Fix: make lab, or PYTHON=/path/to/a/python/that/has/it deploy/node.sh ..." >&2
    exit 1
fi

# A restarted rank must not find the addresses of dead ranks in the rendezvous' store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec "$PYTHON" -m torch.distributed.run \
    --nnodes "$NODES" --nproc-per-node "$RANKS" --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-id "${JOB:-ddpz}" --rdzv-endpoint "$HEAD:${PORT:-29500}" \
    --rdzv-conf "join_timeout=${WAIT:-600},is_host=$([ "$NODE" = 0 ] && echo true || echo false)" \
    ${here:+--local-addr "$here"} "$@"
