#!/usr/bin/env bash
# Builds Kubernetes' API server and etcd with Go into the folder given, for the tests that skip without them.
set -euo pipefail
output=$(realpath "$1")
kubernetes=34.4
etcd=v3.6.13
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export GOFLAGS=-buildvcs=false

# k8s.io/kubernetes refers to its libraries by folder; as modules they have versions of their own.
mkdir "$work/kubernetes" && cd "$work/kubernetes"
{
  echo "module warmroute.test/apiserver"
  echo "go 1.24.0"
  echo "require k8s.io/kubernetes v1.$kubernetes"
  for library in api apiextensions-apiserver apimachinery apiserver cli-runtime client-go cloud-provider \
    cluster-bootstrap code-generator component-base component-helpers controller-manager cri-api cri-client \
    csi-translation-lib dynamic-resource-allocation endpointslice externaljwt kms kube-aggregator \
    kube-controller-manager kube-proxy kube-scheduler kubectl kubelet metrics mount-utils pod-security-admission \
    sample-apiserver; do
    echo "replace k8s.io/$library => k8s.io/$library v0.$kubernetes"
  done
} > go.mod
printf '//go:build tools\n\npackage tools\n\nimport _ "k8s.io/kubernetes/cmd/kube-apiserver"\n' > tools.go
go mod tidy
go build -ldflags="-s -w -X k8s.io/component-base/version.gitVersion=v1.$kubernetes" \
  -o "$output/kube-apiserver" k8s.io/kubernetes/cmd/kube-apiserver

mkdir "$work/etcd" && cd "$work/etcd"
printf 'module warmroute.test/etcd\n\ngo 1.24.0\n' > go.mod
printf '//go:build tools\n\npackage tools\n\nimport _ "go.etcd.io/etcd/server/v3"\n' > tools.go
go get "go.etcd.io/etcd/server/v3@$etcd"
go mod tidy
go build -ldflags="-s -w" -o "$output/etcd" go.etcd.io/etcd/server/v3
