// Package validity shows that Istio takes whatever package translate gives.
//
// istiod tells nobody of a resource that it rejects: it keeps the one from
// before. So Istio's own validation, at the oldest and the newest version that
// build, reads every golden and the outcome of a million services that no
// registry should have. Each version is a program in a module of its own, since
// one module cannot hold two versions of Istio.
package validity
