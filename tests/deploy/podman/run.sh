#!/usr/bin/env bash
# Runs a command with Podman as its Docker engine, in the folder that build.sh made: run.sh FOLDER COMMAND…
set -euo pipefail
folder=$(realpath "$1")
shift
export CONTAINERS_STORAGE_CONF="$folder/storage.conf" CONTAINERS_CONF="$folder/containers.conf"
# Compose would pull BuildKit's image; Podman builds by itself.
export DOCKER_HOST="unix://$folder/podman.sock" DOCKER_CONFIG="$folder/docker" DOCKER_BUILDKIT=0

# crun refuses the controllers of cgroup v1 beside a cgroup v2, so the service does not see the latter.
unshare --mount --propagation private sh -c \
  '! mountpoint -q /sys/fs/cgroup/unified || umount /sys/fs/cgroup/unified; exec "$@"' sh \
  podman system service --time=0 "$DOCKER_HOST" > "$folder/service.log" 2>&1 &
service=$!
trap 'kill "$service"; wait "$service" || true; rm -f "$folder/podman.sock"' EXIT
for _ in $(seq 100); do
  docker info > /dev/null 2>&1 && break
  kill -0 "$service" || { cat "$folder/service.log"; exit 1; }
  sleep 0.1
done
"$@"
