// Package testkube runs API servers of Kubernetes for tests.
//
// kube-apiserver, controller manager and kubectl are built from the module
// pinned in tools/kube (ten minutes of processor time, once); etcd is that of
// package testetcd. Start runs both, ready in four seconds.
package testkube
