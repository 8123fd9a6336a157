"""Sources of instances: files, DNS, Kubernetes, Ray. Imports settings only; `proxy.operations` applies their sets."""
