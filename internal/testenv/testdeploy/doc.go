// Package testdeploy gets the tools that check what deploy/ holds: charts,
// manifests, alerts, units and packages.
//
// Helm, Kustomize, kubeconform, nfpm and cyclonedx-gomod are built from the
// modules pinned in tools/ (half a minute to two minutes each); promtool and
// systemd-analyze are Debian's (seconds).
package testdeploy
