#!/bin/bash
# usage: drain.sh FILE ENDPOINT_SECONDS LIMIT_SECONDS PORT...
# Makes FILE, which tells the server to close each connection with its answer. Waits ENDPOINT_SECONDS
# for load balancers to forget this pod, then until no client is connected to any of the ports, at
# most LIMIT_SECONDS. Reads /proc/net/tcp, so it needs nothing but bash.
set -u
file=$1 endpoint=$2 limit=$3
shift 3
ports=$(printf ':%04X ' "$@")

# Established (01) connections to the ports from other hosts; loopback is this pod's own.
clients() {
  local local_end remote_end state
  while read -r _ local_end remote_end state _; do
    [[ $state == 01 && " $ports" == *" :${local_end##*:} "* ]] || continue
    case ${remote_end%:*} in
      0100007F | 00000000000000000000000001000000 | 0000000000000000FFFF00000100007F) ;;
      *) return 0 ;;
    esac
  done < <(cat "${PROC_NET:-/proc/net}/tcp" "${PROC_NET:-/proc/net}/tcp6" 2>/dev/null)
  return 1
}

touch "$file"
sleep "$endpoint"
SECONDS=0
while clients && ((SECONDS < limit)); do
  sleep 1
done
exit 0
