#!/usr/bin/env bash
# Makes what `make test-compose` needs where no registry of images can be reached, in the folder given: Podman from Debian's
# packages, Docker Compose built with Go, and stand-ins for the base images, made from Debian's packages. Root on Debian; needs
# the `docker` command and Go.
set -euo pipefail
compose=v2.40.3
here=$(dirname "$(realpath "$0")")
mkdir -p "$1/docker/cli-plugins"
output=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

packages=(podman crun conmon netavark iptables debootstrap)
dpkg --status "${packages[@]}" > /dev/null 2>&1 || {
  apt-get update
  apt-get install --yes --no-install-recommends "${packages[@]}"
}

echo '{}' > "$output/docker/config.json"
if [ ! -x "$output/docker/cli-plugins/docker-compose" ]; then
  mkdir "$work/compose"
  # Its go.mod excludes versions, so `go install` refuses it.
  (cd "$work/compose" && go mod init warmroute.test/compose && go get "github.com/docker/compose/v2/cmd@$compose" &&
    GOFLAGS=-buildvcs=false go build -ldflags="-s -w -X github.com/docker/compose/v2/internal.Version=$compose" \
      -o "$output/docker/cli-plugins/docker-compose" github.com/docker/compose/v2/cmd)
fi

printf '[storage]\ndriver = "overlay"\ngraphroot = "%s"\nrunroot = "%s"\n' "$output/storage" "$output/run" \
  > "$output/storage.conf"
cat > "$output/containers.conf" << END
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "$here/crun_within_limits.py"
tmp_dir = "$output/tmp"
volume_path = "$output/volumes"
[network]
network_backend = "netavark"
END
export CONTAINERS_STORAGE_CONF="$output/storage.conf" CONTAINERS_CONF="$output/containers.conf"

# Debian 13 has the Python of the container file, Valkey and nginx.
debootstrap --variant=minbase --include=python3,python3-venv,valkey-server,nginx-light,ca-certificates trixie "$work/root"
rm -rf "$work"/root/var/cache/apt/archives/*.deb "$work"/root/var/lib/apt/lists/*
ln -s python3 "$work/root/usr/bin/python"
certificates=/etc/ssl/certs/ca-certificates.crt
cp "$certificates" "$work/root$certificates"
mkdir "$work/empty"
tar -C "$work/root" -c . | podman import --quiet -c "ENV SSL_CERT_FILE=$certificates" -c "ENV PIP_CERT=$certificates" \
  - docker.io/library/python:3.13-slim
image() { podman build --quiet --tag "docker.io/$1" --file - "$work/empty"; }
image library/nginx:1.28.0 << 'END'
FROM docker.io/library/python:3.13-slim
CMD ["nginx", "-g", "daemon off;"]
END
image valkey/valkey:8.0.1 << 'END'
FROM docker.io/library/python:3.13-slim
CMD ["valkey-server"]
END
